"""The engine with a stub in the model's place: every schedule, no arithmetic.

The stub keeps the KV cache as the real one would see it: it writes the token into the
slot that the batch's block table names, and reads the whole context back from the slots.
What it returns is a function of that context, so a wrong slot, position or block shows.
"""

import gc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.base import NO_TOKEN, EngineError, KVBytes, Observable
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine import PagedEngine
from labkit.engine.kv_cache_manager import KVCacheManager
from labkit.engine.kv_layout.base import BlockTable
from labkit.engine.request import Request, RequestState, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.stats import Counters

VOCAB, EOS = 31, 30


def next_token(context):
    """What the stub model says after ``context``."""
    return (sum((i + 1) * token for i, token in enumerate(context)) * 7 + len(context)) % VOCAB


def solo(prompt, max_tokens, ignore_eos):
    """The tokens a request must get, computed alone."""
    context, out = list(prompt), []
    while len(out) < max_tokens and (ignore_eos or not out or out[-1] != EOS):
        out.append(next_token(context))
        context.append(out[-1])
    return out


class StubModel:
    """Writes tokens to slots and answers from what the slots hold."""

    def __init__(self, num_blocks, block_size):
        self.slots = np.full((num_blocks, block_size), -1)
        self.block_size = block_size
        self.largest = 0

    def __call__(self, batch):
        self.largest = max(self.largest, batch.total_q)
        contexts = []
        for s, length in enumerate(batch.seq_lens):
            start, stop = batch.cu_seqlens_q[s : s + 2]
            for row in range(start, stop):
                position = length - (stop - row)
                assert batch.positions[row] == position
                block = batch.block_tables[s, position // self.block_size]
                assert block != 0, "the null block was written"
                self.slots[block, position % self.block_size] = batch.tokens[row]
            table = batch.block_tables[s]
            contexts.append(
                [
                    self.slots[table[p // self.block_size], p % self.block_size]
                    for p in range(length)
                ]
            )
        ends = {int(stop) - 1: s for s, stop in enumerate(batch.cu_seqlens_q[1:])}
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        for i, row in enumerate(batch.logit_rows):
            logits[i, next_token(contexts[ends[int(row)]])] = 1
        return logits


def make_engine(num_blocks=9, block_size=4, prefixes="none", **options):
    pool = BlockPool(num_blocks)
    prefixes = prefix_cache.create(prefixes, pool, block_size)
    cache = KVCacheManager(pool, block_size, prefixes, block_bytes=100)
    scheduler = Scheduler(config.Scheduler(**options), cache, frozenset({EOS}))
    model = StubModel(num_blocks, block_size)
    engine = PagedEngine(
        scheduler=scheduler,
        cache=cache,
        run_model=model,
        counters=Counters(),
        vocab_size=VOCAB,
        notes={},
    )
    return engine, model


def run(engine, requests):
    """Submit all, step to the end; tokens and last events by request id."""
    for request in requests:
        engine.submit(request)
    tokens, last = {}, {}
    while engine.has_work():
        for event in engine.step():
            assert event.request_id not in last
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason:
                last[event.request_id] = event
        engine.check()
    return tokens, last


def request(request_id, prompt, max_tokens, ignore_eos=True, priority=0, **params):
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params),
        priority=priority,
    )


def legal(options):
    """Tell whether the config allows these strategies together."""
    try:
        config.Scheduler(**options)
    except config.ConfigError:
        return False
    return True


@st.composite
def strategies(draw):
    """Any legal combination of caps and strategies."""
    seqs = draw(st.integers(1, 4))
    budget = seqs + draw(st.integers(0, 8))
    chunk = draw(st.none() | st.integers(1, budget))
    reservation = draw(st.sampled_from(config.Reservation))
    optimistic = reservation is config.Reservation.optimistic
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "chunk": chunk,
        "chunk_policy": draw(st.sampled_from(config.ChunkPolicy)),
        "admission": draw(st.sampled_from(config.Admission)),
        "order": draw(st.sampled_from(config.Order)),
        "composition": draw(st.sampled_from(config.Composition)),
        "reservation": reservation,
        "watermark": draw(st.sampled_from([None, 0, 0.3])) if optimistic else None,
        "queue": draw(st.sampled_from(config.Queue)),
    }


STRATEGIES = strategies().filter(legal)


class EngineMachine(RuleBasedStateMachine):
    """Add, step, abort and finish in any order; the books must balance after each."""

    @initialize(
        num_blocks=st.integers(2, 14),
        options=STRATEGIES,
        every=st.sampled_from([0, 0, 1, 2, 3, 5]),
        prefixes=st.sampled_from(config.PrefixCache),
        alphabet=st.sampled_from([2, VOCAB]),
    )
    def start(self, num_blocks, options, every, prefixes, alphabet):
        self.engine, self.model = make_engine(num_blocks, prefixes=prefixes.value, **options)
        self.alphabet = alphabet  # few tokens make many shared prefixes
        self.options, self.every = options, every
        self.requests, self.tokens, self.dead = {}, {}, set()
        self.steps = self.preempted = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, ignore_eos, priority):
        prompt = [token % self.alphabet for token in prompt]
        new = request(f"r{len(self.requests)}", prompt, max_tokens, ignore_eos, priority)
        self.requests[new.request_id] = new
        self.tokens[new.request_id] = []
        self.engine.submit(new)

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            self.engine.abort(request_id)
            self.dead.add(request_id)

    @rule(data=st.data())
    def preempt(self, data):
        """Preempt any request, at any time: waiting and dead ones must not notice."""
        if self.requests:
            self.force_preemption(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def clear(self):
        self.engine.clear_cache()

    def force_preemption(self, request_id):
        self.engine._scheduler.preempt(request_id)
        self.preempted += 1

    @rule()
    def step(self):
        self.steps += 1
        if self.every and self.steps % self.every == 0 and self.requests:
            self.force_preemption(f"r{self.steps % len(self.requests)}")
        self.plain_step()

    def plain_step(self):
        live, before = self.engine._scheduler.has_work(), self.computed()
        self.take_events()
        assert self.computed() > before or not live, "a step with live requests computed nothing"

    def computed(self):
        return self.engine.counters().get("tokens.computed", 0)

    def take_events(self):
        for event in self.engine.step():
            assert event.request_id not in self.dead, "an event for a dead request"
            if event.token != NO_TOKEN:
                self.tokens[event.request_id].append(event.token)
            if event.finish_reason is not None:
                self.dead.add(event.request_id)
                self.check_finished(event)

    def check_finished(self, event):
        asked = self.requests[event.request_id]
        got = self.tokens[event.request_id]
        if event.finish_reason == "error":
            slots = len(asked.prompt_token_ids) + asked.params.max_tokens - 1
            capacity = self.engine.counters()["blocks.total"]
            assert not asked.prompt_token_ids or -(-slots // 4) > capacity
            assert got == [] and event.error
        else:
            assert got == self.solo(asked.params, asked.prompt_token_ids)

    def solo(self, params, prompt):
        return solo(prompt, params.max_tokens, params.ignore_eos)

    @invariant()
    def books_balance(self):
        if hasattr(self, "engine"):
            self.engine.check()
            assert self.model.largest <= self.options["max_num_batched_tokens"]

    def most(self, tokens):
        """How many tokens may be computed for so many asked, recomputed ones aside."""
        return tokens

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        tokens = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in self.requests.values())
        # Each token is computed once, and again for each later request that is in its way.
        for _ in range((tokens + 1) * (len(self.requests) + 1)):
            if not self.engine.has_work():
                break
            self.plain_step()
            self.engine.check()
        assert not self.engine.has_work(), "steps are not bounded"
        assert self.dead == set(self.requests)
        self.engine.clear_cache()
        counters = self.engine.counters()
        assert counters["blocks.allocated"] == counters["blocks.freed"]
        assert counters.get("tokens.computed", 0) - counters["tokens.recomputed"] <= self.most(
            tokens
        )
        if self.options["reservation"] is config.Reservation.full:
            assert counters["preemptions"] <= self.preempted


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_prompt_lengths_around_block_boundaries(length, max_tokens):
    engine, _ = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    prompts = {"a": list(range(1, length + 1)), "b": list(range(2, length + 2))}
    tokens, last = run(engine, [request(k, p, max_tokens) for k, p in prompts.items()])
    for key, prompt in prompts.items():
        assert tokens[key] == solo(prompt, max_tokens, True)
        assert last[key].finish_reason == "length"


def test_a_partial_chunk_never_samples():
    engine, _ = make_engine(max_num_seqs=1, max_num_batched_tokens=3)
    engine.submit(request("a", range(1, 11), 1))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 0, 1]
    assert not engine.has_work()


def test_decodes_share_steps_with_prefill_chunks_within_the_budget():
    engine, model = make_engine(40, max_num_seqs=3, max_num_batched_tokens=5)
    requests = [request("a", [1], 12), request("b", range(1, 20), 3), request("c", [2, 3], 4)]
    tokens, _ = run(engine, requests)
    assert {k: len(v) for k, v in tokens.items()} == {"a": 12, "b": 3, "c": 4}
    counters = engine.counters()
    assert counters["steps.mixed"] > 0 and model.largest == 5
    assert counters["tokens.prefill"] == 22
    # The last token of each request is never computed.
    assert counters["tokens.decode"] == 11 + 2 + 3
    assert counters["engine.paged"] == counters["steps.total"]


def test_the_chunk_cap_holds_per_request():
    engine, _ = make_engine(40, max_num_seqs=2, max_num_batched_tokens=8, chunk=3)
    engine.submit(request("a", range(1, 10), 1))
    engine.submit(request("b", range(1, 10), 1))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 2]


def test_full_reservation_admits_in_order_and_never_starves():
    engine, _ = make_engine(5, max_num_seqs=4, max_num_batched_tokens=16)  # 4 blocks of 4
    engine.submit(request("large", range(1, 9), 5))  # 12 slots: 3 blocks
    engine.submit(request("next", range(1, 6), 4))  # 8 slots: 2 blocks, must wait
    engine.submit(request("small", [1], 2))  # would fit, but came later
    assert {event.request_id for event in engine.step()} == {"large"}
    while engine.has_work():
        engine.step()
        engine.check()
    assert engine.counters()["requests.finished"] == 3


def test_a_request_that_can_never_fit_is_refused_and_the_others_go_on():
    engine, _ = make_engine(5, max_num_seqs=4, max_num_batched_tokens=16)
    requests = [
        request("good", [1, 2], 3),
        request("huge", range(1, 14), 5),
        request("empty", [], 3),
        request("alien", [VOCAB], 3),
        request("fits", range(1, 14), 4),
    ]
    tokens, last = run(engine, requests)
    assert {k: v.finish_reason for k, v in last.items()} == {
        "good": "length",
        "huge": "error",
        "empty": "error",
        "alien": "error",
        "fits": "length",
    }
    assert "5 KV blocks, the pool has 4; raise the budget" in last["huge"].error
    assert tokens["good"] == solo([1, 2], 3, True)
    assert engine.counters()["requests.refused"] == 3


def test_a_live_id_is_refused_and_a_finished_one_may_return():
    engine, _ = make_engine()
    engine.submit(request("a", [1], 2))
    with pytest.raises(EngineError, match="live already"):
        engine.submit(request("a", [1], 2))
    run(engine, [])
    assert run(engine, [request("a", [1], 2)])[0]["a"] == solo([1], 2, True)


def test_a_look_between_steps_tells_kv_bytes_and_who_was_admitted():
    engine, _ = make_engine(5, max_num_seqs=2, max_num_batched_tokens=4)  # blocks of 4 tokens
    assert isinstance(engine, Observable)
    engine.submit(request("a", range(1, 7), 3))  # 8 slots: 2 blocks of 100 bytes
    engine.submit(request("b", range(1, 10), 4))  # 12 slots: 3 blocks, must wait
    assert not engine.is_running("a") and engine.kv_bytes() == KVBytes(0, 0)
    engine.step()
    assert (engine.is_running("a"), engine.is_running("b")) == (True, False)
    assert engine.kv_bytes() == KVBytes(held=200, used=4 * 25)
    run(engine, [])
    assert not engine.is_running("a") and engine.kv_bytes() == KVBytes(0, 0)


def test_stop_tokens_and_end_of_text():
    prompt = [3, 1, 4]
    free = solo(prompt, 12, True)
    engine, _ = make_engine(40, max_num_seqs=4)
    stop = free[2]
    first = free.index(stop)
    tokens, last = run(engine, [request("a", prompt, 12, stop_token_ids=(stop,))])
    assert tokens["a"] == free[: first + 1] and last["a"].finish_reason == "stop"
    # A prompt after which the stub says end of text at once.
    prompt = next([a, b] for a in range(VOCAB) for b in range(VOCAB) if next_token([a, b]) == EOS)
    tokens, last = run(engine, [request("b", prompt, 5, ignore_eos=False)])
    assert tokens["b"] == [EOS] and last["b"].finish_reason == "stop"
    tokens, last = run(engine, [request("c", prompt, 5)])
    assert len(tokens["c"]) == 5 and last["c"].finish_reason == "length"


def test_abort_frees_blocks_at_once_and_silences_the_request():
    engine, _ = make_engine(5, max_num_seqs=2, max_num_batched_tokens=4)
    engine.submit(request("a", range(1, 10), 6))
    engine.submit(request("b", range(1, 10), 6))
    engine.step()
    held = engine.counters()
    assert held["blocks.allocated"] - held["blocks.freed"] == 4
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    after = engine.counters()
    assert after["blocks.allocated"] == after["blocks.freed"]
    tokens, _ = run(engine, [])
    assert set(tokens) == {"b"} and tokens["b"] == solo(range(1, 10), 6, True)
    assert engine.counters()["requests.aborted"] == 1


def test_peak_kv_bytes_follow_the_blocks_held():
    engine, _ = make_engine(9, max_num_seqs=1)
    run(engine, [request("a", range(1, 9), 4), request("b", [1], 1)])  # 11 slots: 3 blocks
    assert engine.counters()["peak_kv_bytes"] == 300
    engine.reset_counters()
    assert engine.counters()["peak_kv_bytes"] == 0
    run(engine, [request("c", [1], 1)])
    assert engine.counters()["peak_kv_bytes"] == 100


def test_two_engines_share_nothing():
    first, _ = make_engine()
    second, _ = make_engine()
    first.submit(request("a", [1, 2], 3))
    assert not second.has_work()
    second.submit(request("a", [1, 2], 3))
    first.abort("a")
    assert run(second, [])[0]["a"] == solo([1, 2], 3, True)
    assert first.counters()["engine.paged"] == 0 < second.counters()["engine.paged"]


def test_a_closed_engine_serves_nothing():
    engine, _ = make_engine()
    engine.submit(request("a", [1, 2], 3))
    engine.close()
    assert not engine.has_work()
    engine.submit(request("b", [1, 2], 3))
    with pytest.raises(EngineError, match="closed"):
        engine.step()


OPTIMISTIC = {"reservation": config.Reservation.optimistic, "chunk": 7}
SOAKS = {
    "full": {"chunk": 7},
    "optimistic": OPTIMISTIC,
    "priority": {**OPTIMISTIC, "queue": config.Queue.priority, "watermark": 0},
    "split": {**OPTIMISTIC, "composition": config.Composition.split},
    "prefill_first": {**OPTIMISTIC, "order": config.Order.prefill_first, "watermark": 0},
    "static": {"admission": config.Admission.static, "order": config.Order.prefill_first},
    "hash": {**OPTIMISTIC, "prefixes": "hash", "watermark": 0},
    "radix": {**OPTIMISTIC, "prefixes": "radix", "watermark": 0},
}


def remains():
    """Count what the engines of this process keep of requests."""
    gc.collect()
    return sum(type(thing) in (RequestState, BlockTable) for thing in gc.get_objects())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "priority" else n for n in SOAKS]
)
def test_soak_two_thousand_requests_in_a_pool_far_too_small(name):
    """All finish with the tokens they would get alone, and nothing of them is left."""
    rng, before = np.random.default_rng(0), remains()
    engine, _ = make_engine(12, max_num_seqs=6, max_num_batched_tokens=10, **SOAKS[name])
    asked, tokens, last, aborted = {}, {}, {}, set()
    trunk = rng.integers(0, VOCAB, 24).tolist()
    while len(asked) < 2000 or engine.has_work():
        for _ in range(int(rng.integers(0, 4)) if len(asked) < 2000 else 0):
            prompt = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
            if rng.random() < 0.5:
                prompt[:-1] = trunk[: len(prompt) - 1]
            new = request(
                f"r{len(asked)}",
                prompt,
                int(rng.integers(1, 25)),
                bool(rng.integers(2)),
                int(rng.integers(3)),
            )
            asked[new.request_id] = new
            engine.submit(new)
        if rng.random() < 0.1 and asked:
            victim = f"r{rng.integers(max(0, len(asked) - 40), len(asked))}"
            if victim not in last:
                aborted.add(victim)
            engine.abort(victim)
        for event in engine.step():
            assert event.request_id not in aborted and event.request_id not in last
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason:
                last[event.request_id] = event
        engine.check()
    assert set(last) | aborted == set(asked) and len(aborted) > 20
    refused = {key for key, event in last.items() if event.finish_reason == "error"}
    for key in set(last) - refused:
        params = asked[key].params
        assert tokens[key] == solo(
            asked[key].prompt_token_ids, params.max_tokens, params.ignore_eos
        )
    engine.clear_cache()
    counters = engine.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    cached = "prefixes" in SOAKS[name]
    assert (counters["prefix.hit_tokens"] > 0) == (counters["prefix.evicted_blocks"] > 0) == cached
    assert len(refused) == counters["requests.refused"] > 0
    assert (counters["preemptions"] > 0) == ("reservation" in SOAKS[name])
    assert remains() - before < 20, "memory grows with requests"
