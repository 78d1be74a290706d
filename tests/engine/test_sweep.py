"""Every pair of choices, together in one engine: the tokens are plain mlx_lm's.

Combinations are drawn at random, those that the config refuses are left out, and as few as
cover every pair that any of them has are run. The logits are bit for bit those of each request
alone, in the plainest engine with the same attention, which the margins and log probabilities
of every token show; and that engine's are mlx_lm's, within rounding.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from test_paged_tokens import prompts

from labkit import config
from labkit.engine import Request, SamplingParams, create

TOKENS = 9
PROMPTS = prompts((3, 17, 1, 25, 16, 25))
PROMPTS[5] = PROMPTS[3][:16] + PROMPTS[5][:4]  # something to find in a prefix cache
AXES = {
    "engine": ("paged", "paged", "paged", "contiguous", "padded", "naive"),
    "backend": ("fused", "gather", "reference", "sdpa"),
    "resolver": ("binary_search", "seq_map", "padded_grid", "work_plan"),
    "unit": ("auto", "head", "token"),
    "tile_threshold": (2, 12),
    "block_size": (8, 16, 32),
    "admission": ("continuous", "static"),
    "order": ("decode_first", "prefill_first"),
    "composition": ("mixed", "split"),
    "chunk": (None, 8),
    "chunk_policy": ("static", "shrinking"),
    "reservation": ("full", "optimistic"),
    "queue": ("fcfs", "priority"),
    "decode_shape": ("exact", "bucketed", "fixed"),
    "prefix_cache": ("none", "hash", "radix"),
    "prefix_align": ("block", "chunk"),
    "speculation": ("none", "ngram", "draft"),
    "verification": ("window", "staircase"),
    "pipeline": ("sync", "overlap"),
}
LAYOUTS = {
    "paged": config.KVLayout.paged,
    "contiguous": config.KVLayout.contiguous,
    "padded": config.KVLayout.padded,
    "naive": config.KVLayout.padded,
}


@cache
def part(kind, **chosen):
    """Most draws share their parts."""
    return kind(**chosen)


def legal(choice):
    """The engine's options, or None where the config refuses them."""
    c = dict(choice)
    speculation = config.Speculation(c["speculation"])
    drafts = {} if c["speculation"] == "none" else {"num_draft_tokens": 3}
    try:
        return config.Engine(
            name=c["engine"],
            blas=config.Blas.stock,
            batch_invariant=True,
            kv=part(config.KV, layout=LAYOUTS[c["engine"]], block_size=c["block_size"]),
            attention=part(
                config.Attention,
                backend=c["backend"],
                resolver=c["resolver"],
                unit=c["unit"],
                tile_threshold=c["tile_threshold"],
            ),
            scheduler=part(
                config.Scheduler,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                admission=config.Admission(c["admission"]),
                order=config.Order(c["order"]),
                composition=config.Composition(c["composition"]),
                chunk=c["chunk"],
                chunk_policy=config.ChunkPolicy(c["chunk_policy"]),
                reservation=config.Reservation(c["reservation"]),
                queue=c["queue"],
            ),
            budget=part(config.Budget, blocks=20 if c["reservation"] == "optimistic" else 64),
            drafts=part(
                config.Drafts, verification=config.Verification(c["verification"]), **drafts
            ),
            decode_shape=config.DecodeShape(c["decode_shape"]),
            prefix_cache=config.PrefixCache(c["prefix_cache"]),
            prefix_align=config.PrefixAlign(c["prefix_align"]),
            speculation=speculation,
            pipeline=config.Pipeline(c["pipeline"]),
        )
    except config.ConfigError:
        return None


def drawn(count, seed):
    """Legal combinations, as tuples of (axis, choice)."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        choice = {axis: rng.choice(values) for axis, values in AXES.items()}
        if choice["engine"] != "paged":  # most of what follows needs blocks
            choice |= {"backend": "sdpa", "resolver": "binary_search", "composition": "split"}
        for axis, values in AXES.items():  # half of the rest as it is by default
            if rng.random() < 0.5 and axis not in ("engine", "backend", "composition"):
                choice[axis] = values[0]
        if choice["backend"] != "fused":  # else most draws would be refused
            choice |= {"resolver": "binary_search", "unit": "auto", "tile_threshold": 2}
        if choice["speculation"] == "none":
            choice["verification"] = "window"
        if choice["admission"] == "static":
            choice["order"] = "prefill_first"
        if legal(choice) is not None:
            samples.append(tuple(choice.items()))
    return samples


def covering(samples):
    """The fewest combinations, greedily, that have every pair which any of them has."""
    bits = {}  # a number with one bit for each pair
    pairs = {
        combination: sum(
            bits.setdefault(pair, 1 << len(bits)) for pair in combinations(combination, 2)
        )
        for combination in samples
    }
    missing = sum(bits.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda combination: (pairs[combination] & missing).bit_count())
        chosen.append(best)
        missing &= ~pairs[best]
    return chosen


SWEEP = covering(drawn(3_000, seed=21))  # of 24 seeds the one with the most pairs, 979 of 982


def named(combination):
    plain = {axis: values[0] for axis, values in AXES.items()}
    return ",".join(f"{axis}={c}" for axis, c in combination if c != plain[axis]) or "default"


PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2)
REQUESTS = [Request(str(i), p, PARAMS, priority=i % 3) for i, p in enumerate(PROMPTS)]


def serve(engine, requests):
    """Tokens, and margins with log probabilities, of requests that come together."""
    for request in requests:
        engine.submit(request)
    tokens, numbers = {}, {}
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens.setdefault(event.request_id, []).append(event.token)
            numbers.setdefault(event.request_id, []).append((event.margin, event.logprobs))
        engine.check()
    return tokens, numbers


@pytest.fixture(scope="module")
def expected(plain_greedy):
    return {str(i): plain_greedy("qwen3", prompt, TOKENS) for i, prompt in enumerate(PROMPTS)}


def plainest(combination):
    """The same attention, which may round in a way of its own, and no other choice."""
    c = dict(combination)
    plain = {axis: values[0] for axis, values in AXES.items()}
    plain |= {"engine": c["engine"], "backend": c["backend"]}
    if c["engine"] != "paged":
        plain |= {"composition": "split", "order": "prefill_first"}
    if c["engine"] == "naive":
        plain["admission"] = "static"
    return tuple(plain.items())


@pytest.fixture(scope="module")
def alone(model_dir, plain_steps):
    """A function: combination -> the numbers of each request alone in the plainest engine."""
    known = {}

    def numbers_of(combination):
        plain = plainest(combination)
        if plain not in known:
            engine = create(legal(plain), model_dir("qwen3"))
            known[plain] = {r.request_id: serve(engine, [r])[1][r.request_id] for r in REQUESTS}
            engine.close()
            check_against_mlx_lm(known[plain], plain_steps)
        return known[plain]

    return numbers_of


def check_against_mlx_lm(numbers, plain_steps):
    for request in REQUESTS:
        steps = plain_steps("qwen3", request.prompt_token_ids, TOKENS)
        for (margin, expected), (token, logprobs) in zip(
            numbers[request.request_id], steps, strict=True
        ):
            second, best = sorted(logprobs)[-2:]
            assert margin == pytest.approx(best - second, abs=1e-4)
            assert expected.token == pytest.approx(logprobs[token], abs=1e-4)
            assert [value for _, value in expected.top] == pytest.approx([best, second], abs=1e-4)


def verify(combination, model_dir, expected, alone):
    engine = create(legal(combination), model_dir("qwen3"))
    tokens, numbers = serve(engine, REQUESTS)
    engine.close()
    assert tokens == expected
    assert numbers == alone(combination)


def test_the_sweep_meets_every_choice():
    met = {pair for combination in SWEEP for pair in combination}
    assert met == {(axis, choice) for axis, choices in AXES.items() for choice in choices}
    assert 10 <= len(SWEEP) <= 120


@pytest.mark.parametrize("combination", SWEEP, ids=named)
def test_every_pair_of_choices(combination, model_dir, expected, alone):
    verify(combination, model_dir, expected, alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_combinations(seed, model_dir, expected, alone):
    for combination in drawn(300, seed=100 + seed)[:50]:
        verify(combination, model_dir, expected, alone)
