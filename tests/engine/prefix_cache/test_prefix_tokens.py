"""With a prefix cache, a real model gives the same tokens as without one."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create

CACHES = [config.PrefixCache.hash, config.PrefixCache.radix]


def options(cache, **changes):
    return config.Engine(
        **{
            "prefix_cache": cache,
            "scheduler": config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
            "kv": config.KV(block_size=8),
            "budget": config.Budget(blocks=64),
            **changes,
        }
    )


def conversation(seed=1):
    """Prompts that share a beginning and grow, as a client's turns do."""
    rng = np.random.default_rng(seed)

    def draw(count):
        return tuple(int(t) for t in rng.integers(0, 298, count))

    system, prompts = draw(37), []
    histories = [system] * 3
    for length in (5, 11, 3):
        for i in range(3):
            histories[i] += draw(length + i)
            prompts.append(histories[i])
    return prompts


def serve(engine, prompts, max_tokens=6, ids=None):
    """Every request's tokens and logit margins, by its index in ``prompts``."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i in ids if ids is not None else range(len(prompts)):
        engine.submit(Request(str(i), prompts[i], params))
    tokens, margins = {}, {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
            margins.setdefault(event.request_id, []).append(event.margin)
        engine.check()
    return tokens, margins


@pytest.mark.parametrize("cache", CACHES)
def test_cold_and_warm_tokens_equal_plain_mlx_lm(cache, model_dir, plain_greedy):
    prompts = conversation()
    expected = {str(i): plain_greedy("qwen3", p, 6) for i, p in enumerate(prompts)}
    engine = create(options(cache), model_dir("qwen3"))
    assert serve(engine, prompts)[0] == expected
    cold = engine.counters()
    assert 0 < cold["prefix.hit_tokens"] < cold["prefix.queried_tokens"]
    assert cold["prefix.queried_tokens"] == sum(map(len, prompts))
    assert cold["tokens.prefill"] == cold["prefix.queried_tokens"] - cold["prefix.hit_tokens"]
    engine.reset_counters()
    assert serve(engine, prompts)[0] == expected
    warm = engine.counters()
    assert warm["prefix.hit_tokens"] == sum((len(p) - 1) // 8 * 8 for p in prompts)
    engine.clear_cache()
    engine.reset_counters()
    assert serve(engine, prompts)[0] == expected
    assert engine.counters()["prefix.hit_tokens"] == cold["prefix.hit_tokens"]


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_margins_are_those_without_a_cache_bit_for_bit(backend, model_dir):
    """Cold, warm, shuffled, alone, under pressure: what is reused is what would be computed."""
    prompts = conversation(2)
    shuffled = np.random.default_rng(0).permutation(len(prompts)).tolist()
    attention = config.Attention(backend=backend)
    plain = create(options(config.PrefixCache.none, attention=attention), model_dir("llama"))
    expected = serve(plain, prompts)
    assert min(m for margins in expected[1].values() for m in margins) > 0
    for cache in CACHES:
        engine = create(options(cache, attention=attention), model_dir("llama"))
        assert serve(engine, prompts) == expected
        assert serve(engine, prompts, ids=shuffled) == expected
        alone = [serve(engine, prompts, ids=[i]) for i in shuffled]
        assert all(
            a[1][str(i)] == expected[1][str(i)] for i, a in zip(shuffled, alone, strict=True)
        )
        tight = options(
            cache,
            attention=attention,
            budget=config.Budget(blocks=17),
            scheduler=config.Scheduler(
                max_num_seqs=4,
                max_num_batched_tokens=16,
                reservation=config.Reservation.optimistic,
                watermark=0,
            ),
        )
        engine = create(tight, model_dir("llama"))
        assert serve(engine, prompts, ids=shuffled) == expected
        counters = engine.counters()
        assert counters["preemptions"] > 0 and counters["prefix.evicted_blocks"] > 0


@pytest.mark.parametrize("cache", CACHES)
def test_a_drafting_model_s_keys_lie_in_shared_blocks(cache, model_dir, plain_greedy):
    """A model that drafts for itself is always right, unless its keys were lost or mixed up."""
    prompts = conversation(3)
    scheduler = config.Scheduler(max_num_seqs=4, max_num_batched_tokens=32)
    drafting = options(cache, speculation=config.Speculation.draft, scheduler=scheduler)
    engine = create(drafting, model_dir("qwen3"))
    expected = {str(i): plain_greedy("qwen3", p, 6) for i, p in enumerate(prompts)}
    for _ in ("cold", "warm"):
        assert serve(engine, prompts)[0] == expected
    counters = engine.counters()
    assert counters["prefix.hit_tokens"] > 0
    assert counters["spec.accepted"] == counters["spec.drafted"] > 40


@pytest.mark.parametrize("cache", CACHES)
def test_prefix_align_reaches_the_cache(cache, model_dir):
    hits = {}
    for align in config.PrefixAlign:
        chunked = config.Scheduler(max_num_seqs=1, max_num_batched_tokens=16, chunk=16)
        engine = create(options(cache, prefix_align=align, scheduler=chunked), model_dir("qwen3"))
        serve(engine, [tuple(range(30))], max_tokens=1)
        serve(engine, [tuple(range(26))], max_tokens=1)
        hits[align] = engine.counters()["prefix.hit_tokens"]
    assert hits == {config.PrefixAlign.block: 24, config.PrefixAlign.chunk: 16}
