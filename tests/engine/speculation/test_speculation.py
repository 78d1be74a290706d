"""Speculation changes no token: outputs equal those without drafts."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chisquare
from stub_engine import EOS, VOCAB, Adversary, StubModel, make_cache, make_engine, run, solo
from stub_engine import request as ask

from labkit import config
from labkit.engine import create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.sampling.sampling_params import SamplingError
from labkit.engine.speculation.draft_model import DraftModelProposer


class Oracle(Adversary):
    """Is always right, as long as it may be."""

    def propose(self, wanted):
        return [tuple(solo(want.state.token_ids, want.limit)) for want in wanted]


class Fool(Adversary):
    """Is always wrong."""

    def propose(self, wanted):
        return [
            tuple((token + 1) % VOCAB for token in solo(want.state.token_ids, want.limit))
            for want in wanted
        ]


def tokens_of(engine, requests):
    return run(engine, requests)[0]


@pytest.mark.parametrize("cut", ["window", "staircase"])
@pytest.mark.parametrize("proposer", [Adversary(), Oracle(), Fool(), "ngram"])
def test_tokens_equal_those_without_speculation(proposer, cut):
    engine, _ = make_engine(60, proposer=proposer, cut=cut, max_num_seqs=4)
    requests = [ask(f"r{i}", range(i, 2 * i + 1), 25) for i in range(7)]
    tokens = tokens_of(engine, requests)
    for request in requests:
        assert tokens[request.request_id] == solo(request.prompt_token_ids, 25)
    counters = engine.counters()
    drafted, accepted = counters["spec.drafted"], counters["spec.accepted"]
    assert (accepted == drafted) == isinstance(proposer, Oracle)
    assert (accepted > 0) != isinstance(proposer, Fool) and drafted > 0
    assert accepted == sum(counters[f"spec.accepted.pos{i}"] for i in range(3))
    assert drafted == sum(counters[f"spec.drafted.pos{i}"] for i in range(3))
    assert counters["spec.unit_segments"] == (drafted if cut == "staircase" else 0)
    assert counters["spec.accepted.pos0"] >= counters["spec.accepted.pos1"]
    # Every token but each request's last is computed once; a wrong draft is computed in vain.
    needed = sum(len(r.prompt_token_ids) + 25 - 1 for r in requests)
    assert counters["tokens.computed"] == needed + drafted - accepted
    assert counters["tokens.output"] == 25 * len(requests)


def test_drafts_are_bounded_by_max_tokens_the_budget_and_the_blocks_held():
    oracle = Oracle()
    engine, _ = make_engine(60, proposer=oracle, num_drafts=6, max_num_seqs=1)
    limits = []
    propose = oracle.propose
    oracle.propose = lambda wanted: limits.append([w.limit for w in wanted]) or propose(wanted)
    run(engine, [ask("a", [1, 2, 3], 12)])
    # 1 token from the prompt, 7 from a full draft, and the last 4 from a draft of 3.
    assert limits == [[6], [3]]
    limits.clear()
    assert len(tokens_of(engine, [ask("b", [1], 1), ask("c", [1, 2], 2)])["c"]) == 2
    assert limits == []  # nothing to draft: one token is sampled anyway
    tight = make_engine(
        60, proposer=oracle, num_drafts=6, max_num_seqs=3, max_num_batched_tokens=5
    )[0]
    run(tight, [ask(name, [1, 2], 9) for name in "abc"])
    assert limits and all(sum(step) + 3 <= 5 for step in limits if len(step) > 1)


def test_a_stop_within_the_accepted_drafts_ends_the_request_there():
    free = solo([3, 1, 4], 12)
    stop = free[3]
    end = free.index(stop) + 1
    engine, _ = make_engine(60, proposer=Oracle(), num_drafts=6)
    engine.submit(ask("a", [3, 1, 4], 12, stop_token_ids=(stop,)))
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.token for event in events] == free[:end]
    assert [event.finish_reason for event in events] == [None] * (end - 1) + ["stop"]
    assert not engine.has_work()
    counters = engine.counters()
    assert counters["tokens.output"] == end
    assert counters["spec.accepted"] == counters["spec.drafted"] == end - 2 > 0
    assert counters["kv.slots_filled"] == 3 + end - 1
    assert counters["blocks.allocated"] == counters["blocks.freed"]


@pytest.mark.parametrize("prefixes", ["hash", "radix"])
def test_the_accepted_drafts_of_the_last_step_are_in_the_kv_cache(prefixes):
    engine, _ = make_engine(60, proposer=Oracle(), num_drafts=6, prefixes=prefixes)
    run(engine, [ask("a", [3, 1, 4], 12)])
    counters = engine.counters()
    assert counters["kv.slots_filled"] == 3 + 12 - 1
    assert counters["prefix.cached_blocks"] == 14 // 4


@pytest.mark.parametrize("prefixes", ["hash", "radix"])
def test_trap_rejected_drafts_are_never_published(prefixes):
    """The same requests, cold and warm: a block with a rejected draft's key would show."""
    for proposer in (Adversary(3), Fool()):
        engine, _ = make_engine(80, proposer=proposer, prefixes=prefixes, max_num_seqs=3)
        rng = np.random.default_rng(0)
        shared = rng.integers(0, VOCAB, 9).tolist()
        requests = [ask(f"r{i}", shared + [i] * i, 14) for i in range(6)]
        cold = tokens_of(engine, requests)
        # The output is submitted again as a prompt: its blocks were cached.
        longer = [
            ask(f"{r.request_id}+", [*r.prompt_token_ids, *cold[r.request_id]], 9) for r in requests
        ]
        warm = tokens_of(engine, longer)
        for request in longer:
            assert warm[request.request_id] == solo(request.prompt_token_ids, 9)
        assert engine.counters()["prefix.hit_tokens"] > 100


class Loaded(StubModel):
    """Says the same distribution after every context, but for its last token."""

    def answer(self, context):
        return np.log(weights(context[-1])).astype(np.float32)


def weights(last):
    """The law of the next token: uneven, and another one after each token."""
    return np.roll(np.r_[np.arange(1.0, 6.0) ** 2, np.full(VOCAB - 5, 1e-9)], last % 3)


@pytest.mark.parametrize("cut", ["window", "staircase"])
def test_sampled_tokens_follow_the_target_and_equal_those_without_speculation(cut):
    """Chi-square of the tokens at drafted positions, given the token before."""
    requests = [ask(f"r{i}", [1], 9, temperature=1.0, seed=i) for i in range(300)]
    plain = tokens_of(make_engine(600, model=Loaded(600, 4), max_num_seqs=16)[0], requests)
    engine, _ = make_engine(600, model=Loaded(600, 4), proposer=Likely(), cut=cut, max_num_seqs=16)
    tokens = tokens_of(engine, requests)
    assert tokens == plain
    accepted = engine.counters()["spec.accepted"]
    assert 0.1 < accepted / engine.counters()["spec.drafted"] < 0.9
    for last in range(3):
        after = [b for sampled in tokens.values() for a, b in pairwise(sampled) if a % 3 == last]
        expected = weights(last) / weights(last).sum()
        possible = expected > 1e-6
        observed = np.bincount(after, minlength=VOCAB)
        assert observed[~possible].sum() == 0 and len(after) > 300
        assert chisquare(observed[possible], expected[possible] * len(after)).pvalue > 0.01


class Likely(Adversary):
    """Drafts the likeliest token after each."""

    def propose(self, wanted):
        drafts = []
        for want in wanted:
            chain = [want.state.token_ids[-1]]
            for _ in range(want.limit):
                chain.append(int(weights(chain[-1]).argmax()))
            drafts.append(tuple(chain[1:]))
        return drafts


class Erring(StubModel):
    """A draft model that is wrong after some contexts."""

    def answer(self, context):
        wrong = sum(context) % 3 == 0
        return np.roll(super().answer(context), wrong)


@pytest.mark.parametrize("prefixes", ["none", "hash", "radix"])
def test_a_draft_model_sees_what_it_would_see_alone(prefixes):
    """After rejected drafts, preemption, other blocks and shared ones: the right context."""
    cache = make_cache(24, 4, prefixes)
    draft = Erring(24, 4)
    proposer = DraftModelProposer(draft, cache, budget=16)
    propose, proposals = proposer.propose, 0

    def checked(wanted):
        nonlocal proposals
        drafts = propose(wanted)
        for want, tokens in zip(wanted, drafts, strict=True):
            context = list(want.state.token_ids)
            for token in tokens:
                assert token == draft.answer(context).argmax()
                context.append(token)
            assert len(tokens) == want.limit
            proposals += 1
        return drafts

    proposer.propose = checked
    engine, _ = make_engine(24, cache=cache, proposer=proposer, num_drafts=3, max_num_seqs=3)
    requests = [ask(f"r{i}", [1, 2, 3, 4, 5, 6, 7, 8, i % 2, i], 14) for i in range(9)]
    for request in requests:
        engine.submit(request)
    tokens, steps = {}, 0
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        steps += 1
        if steps % 4 == 0:
            for i in range(9):  # all that run: each gets another's blocks
                engine._scheduler.preempt(f"r{i}")
    for request in requests:
        assert tokens[request.request_id] == solo(request.prompt_token_ids, 14)
    counters = engine.counters()
    assert 0.2 < counters["spec.accepted"] / counters["spec.drafted"] < 0.9
    assert proposals > 30 and counters["preemptions"] > 0


class FailsAfter:
    """A constraint that allows every token, and fails after ``limit`` of them."""

    def __init__(self, limit):
        self.limit = limit

    def allowed(self, output, vocab_size):
        if len(output) >= self.limit:
            raise SamplingError("no more")
        return np.ones(vocab_size, bool)


def test_the_draft_model_keeps_the_blocks_before_the_first_that_changed():
    cache, draft = make_cache(24, 4, "hash"), StubModel(24, 4)
    proposer = DraftModelProposer(draft, cache, budget=64)
    engine, _ = make_engine(24, cache=cache, proposer=proposer, num_drafts=2, max_num_seqs=1)
    engine.submit(ask("a", range(1, 18), 12))
    events = [event for _ in range(3) for event in engine.step()]
    before = cache.table("a").block_ids
    engine._scheduler.preempt("a")
    cache.pool.allocate(1)  # the next free block is another request's now
    draft.largest = 0
    events += engine.step()
    after = cache.table("a").block_ids
    assert (before[:4] == after[:4]).all() and before[-1] != after[-1]
    while engine.has_work():
        events += engine.step()
    assert [event.token for event in events] == solo(range(1, 18), 12)
    assert 1 < draft.largest <= 8  # not the whole prompt again


def test_a_constraint_that_fails_while_drafting_ends_the_request_at_its_own_token():
    cache = make_cache(24, 4, "none")
    proposer = DraftModelProposer(StubModel(24, 4), cache, budget=16)
    engine, _ = make_engine(24, cache=cache, proposer=proposer, num_drafts=3)
    prompt = [3, 1, 4]
    failing = ask("failing", prompt, 14, constraint=FailsAfter(6))
    tokens, last = run(engine, [failing, ask("fine", prompt, 14)])
    assert tokens == {"failing": solo(prompt, 6), "fine": solo(prompt, 14)}
    assert last["failing"].error == "no more" and last["fine"].finish_reason == "length"


PROMPT_LENGTHS = (3, 8, 17, 40, 1, 33)


def options(**drafts):
    return config.Engine(
        scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=32),
        kv=config.KV(block_size=8),
        budget=config.Budget(blocks=64),
        speculation=config.Speculation.draft,
        drafts=config.Drafts(**drafts),
    )


def prompts():
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(0, 298, n).tolist()) for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(temperature, model_dir, plain_greedy):
    """The same weights draw the same tokens from the same random numbers."""
    engine = create(options(), model_dir("qwen3"))
    requests = [
        ask(str(i), prompt, 14, temperature=temperature) for i, prompt in enumerate(prompts())
    ]
    tokens = tokens_of(engine, requests)
    counters = engine.counters()
    assert counters["spec.accepted"] == counters["spec.drafted"] > 40
    if temperature == 0:
        for i, prompt in enumerate(prompts()):
            assert tokens[str(i)] == plain_greedy("qwen3", prompt, 14)


@pytest.mark.parametrize("verification", config.Verification)
def test_a_draft_model_of_fewer_layers_changes_no_token(verification, model_dir, plain_greedy):
    chosen = options(draft_layers=2, verification=verification)
    chosen.prefix_cache = config.PrefixCache.hash
    engine = create(chosen, model_dir("qwen3"))
    for _ in range(2):  # cold, then with a prefix cache that is warm
        requests = [ask(f"{_} {i}", prompt, 14) for i, prompt in enumerate(prompts())]
        tokens = tokens_of(engine, requests)
        for i, prompt in enumerate(prompts()):
            assert tokens[f"{_} {i}"] == plain_greedy("qwen3", prompt, 14)
    counters = engine.counters()
    assert 0 < counters["spec.accepted"] < counters["spec.drafted"]
    assert counters["prefix.hit_tokens"] > 0
    assert engine.notes["draft"].endswith("layers: 2")
    # The draft model's forwards are not the target's: a claim on one is no claim on the other.
    forwards = counters["forward.eager"] + counters.get("forward.replayed", 0)
    assert forwards == counters["forwards.batched"] == counters["steps.total"]
    assert counters["draft.forward.replayed"] > 0 and counters["draft.forward.eager"] > 0
    assert counters["draft.forwards.batched"] > counters["spec.draft"]
    assert counters["kernel.decode"] + counters["kernel.tiled"] == 3 * forwards
    assert 0 < counters["host_ms"] < counters["step_ms"] - counters["draft.device_ms"]


def test_a_draft_survives_preemption(model_dir, plain_greedy):
    """Other blocks after it: what the draft had computed is computed again."""
    engine = create(options(), model_dir("qwen3"))
    for i, prompt in enumerate(prompts()[:4]):
        engine.submit(ask(str(i), prompt, 14))
    tokens, steps = {}, 0
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        steps += 1
        if steps % 2 == 0:
            engine._scheduler.preempt(str(steps // 2 % 4))
    for i, prompt in enumerate(prompts()[:4]):
        assert tokens[str(i)] == plain_greedy("qwen3", prompt, 14)
    counters = engine.counters()
    assert counters["preemptions"] > 1
    assert counters["spec.accepted"] == counters["spec.drafted"]


def test_a_draft_of_another_vocabulary_or_too_many_layers_is_refused(model_dir, tmp_path):
    from small_models import COMMON, build_model_dir

    other = build_model_dir(
        tmp_path / "other",
        {**COMMON, "model_type": "qwen3", "tie_word_embeddings": True, "vocab_size": 310},
    )
    with pytest.raises(EngineError, match="vocabulary has 310 ids, but the model's has 300"):
        create(options(draft_path=str(other)), model_dir("qwen3"))
    with pytest.raises(EngineError, match=r"draft_layers=4: must be at most num_hidden_layers=3 "):
        create(options(draft_layers=4), model_dir("qwen3"))


def test_another_model_may_draft(model_dir, plain_greedy):
    engine = create(options(draft_path=str(model_dir("llama"))), model_dir("qwen3"))
    tokens = tokens_of(engine, [ask(str(i), prompt, 8) for i, prompt in enumerate(prompts()[:3])])
    for i, prompt in enumerate(prompts()[:3]):
        assert tokens[str(i)] == plain_greedy("qwen3", prompt, 8)


def test_end_of_text_is_among_the_stub_answers():
    assert EOS in {solo([a, b], 1)[0] for a in range(VOCAB) for b in range(VOCAB)}
