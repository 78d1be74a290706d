"""Optimistic reservation, growth, preemption and queueing in the scheduler."""

import pytest

from labkit import config
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler


class Bench:
    """A scheduler with optimistic reservation over ``blocks`` blocks of four tokens."""

    def __init__(self, blocks, **options):
        options = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "reservation": config.Reservation.optimistic,
            "watermark": 0,
        } | options
        self.cache = PagedKVCacheManager(BlockPool(blocks + 1, 4))
        self.scheduler = Scheduler(config.Scheduler(**options), self.cache, frozenset())
        self.tokens = {}

    def add(self, name, prompt, outputs, priority=0):
        params = SamplingParams(max_tokens=outputs)
        request = Request(name, tuple(range(prompt)), params, priority=priority)
        self.scheduler.add(request)

    def step(self):
        output = self.scheduler.schedule()
        # A token is its own position, so that a lost or doubled one shows.
        sampled = {
            c.state.request_id: [Sampled(c.state.num_output_tokens, None)]
            for c in output.chunks
            if c.samples
        }
        for event in self.scheduler.update(output, sampled):
            self.tokens.setdefault(event.request_id, []).append(event.token)
        self.scheduler.check()
        return {chunk.state.request_id: chunk.num_tokens for chunk in output.chunks}

    def drain(self, bound=500):
        while self.scheduler.has_work():
            self.step()
            bound -= 1
            assert bound, "livelock"

    def counts(self):
        return self.scheduler.counts.as_dict()


def test_blocks_are_held_for_known_tokens_only_and_grow():
    bench = Bench(8)
    bench.add("a", 4, 6)
    bench.step()
    assert len(bench.cache.table("a")) == 1
    bench.step()
    assert len(bench.cache.table("a")) == 2
    bench.drain()
    assert bench.counts()["reservation.optimistic"] == 1
    assert "preemptions" not in bench.counts()


def test_more_requests_run_than_full_reservation_would_admit():
    running = {}
    for reservation in config.Reservation:
        watermark = 0 if reservation is config.Reservation.optimistic else None
        bench = Bench(4, reservation=reservation, watermark=watermark)
        for name in "abcd":
            bench.add(name, 3, 6)  # 8 slots to the end: 2 blocks
        bench.step()
        running[reservation.value] = len(bench.scheduler._running)
    assert running == {"full": 2, "optimistic": 4}


def test_the_last_in_line_is_preempted_and_comes_back_first_with_its_tokens():
    bench = Bench(4)
    for name in "ab":
        bench.add(name, 4, 9)  # 12 slots to the end: 3 blocks each
    bench.step()
    bench.step()  # both grow to 2 blocks: none is free
    bench.add("late", 1, 1)
    assert [set(bench.step()) for _ in range(3)] == [{"a", "b"}] * 3
    # a needs its third block; what b leaves is for the next step, and for b first.
    assert bench.step() == {"a": 1}
    assert bench.tokens["b"] == [0, 1, 2, 3, 4]
    assert bench.counts()["preemptions"] == 1
    # `late` needs one block, and one is free, but b came before it.
    assert [bench.step() for _ in range(3)] == [{"a": 1}] * 3
    assert bench.step() == {"b": 9, "late": 1}
    bench.drain()
    assert bench.tokens == {"a": list(range(9)), "b": list(range(9)), "late": [0]}
    # Computed before the preemption: the prompt and four of b's tokens.
    assert bench.counts()["tokens.recomputed"] == 8


def test_only_as_many_requests_as_needed_are_preempted():
    bench = Bench(3)
    for name in "abc":
        bench.add(name, 4, 5)
    bench.step()
    assert len(bench.scheduler._running) == 3
    # Each wants a second block: c gives its own to a, and b must give way itself.
    assert bench.step() == {"a": 1}
    assert bench.counts()["preemptions"] == 2
    bench.drain()
    assert all(tokens == list(range(5)) for tokens in bench.tokens.values())


def test_the_watermark_reserves_blocks_for_running_requests():
    bench = Bench(8, watermark=0.5)
    for name in "abc":
        bench.add(name, 8, 5)
    bench.step()
    assert len(bench.scheduler._running) == 2  # 4 blocks held, 4 kept
    bench.drain()
    assert "preemptions" not in bench.counts()


def test_a_request_larger_than_the_watermark_leaves_runs_alone():
    bench = Bench(4, watermark=0.5)
    bench.add("a", 12, 5)
    bench.drain()
    assert bench.tokens["a"] == list(range(5))


def test_a_request_that_can_never_fit_is_refused_though_its_prompt_would():
    bench = Bench(4)
    with pytest.raises(EngineError, match="need 5 KV blocks, but the pool has only 4"):
        bench.add("a", 4, 14)
    bench.add("b", 4, 13)
    bench.drain()


def test_a_preempted_request_recomputes_within_budget_and_chunk_cap():
    bench = Bench(8, max_num_batched_tokens=4, chunk=3)
    bench.add("a", 4, 9)
    for _ in range(5):
        bench.step()
    assert bench.tokens["a"] == [0, 1, 2, 3]
    bench.scheduler.preempt("a")
    assert [bench.step() for _ in range(4)] == [{"a": 3}, {"a": 3}, {"a": 2}, {"a": 1}]
    assert bench.tokens["a"] == [0, 1, 2, 3, 4, 5]
    assert bench.counts()["tokens.recomputed"] == 7


def test_a_result_for_a_request_preempted_in_flight_is_dropped():
    bench = Bench(8)
    bench.add("a", 4, 3)
    output = bench.scheduler.schedule()
    bench.scheduler.preempt("a")
    assert bench.scheduler.update(output, {"a": [Sampled(0, None)]}) == []
    bench.drain()
    assert bench.tokens["a"] == [0, 1, 2]


def test_a_result_from_before_a_preemption_is_dropped_though_it_runs_again():
    bench = Bench(8)
    bench.add("a", 4, 3)
    stale = bench.scheduler.schedule()
    bench.scheduler.preempt("a")
    resumed = bench.scheduler.schedule()
    assert bench.scheduler.update(stale, {"a": [Sampled(7, None)]}) == []
    events = bench.scheduler.update(resumed, {"a": [Sampled(0, None)]})
    assert [event.token for event in events] == [0]
    bench.scheduler.check()


def test_a_victim_that_was_scheduled_already_gives_its_tokens_back():
    bench = Bench(
        4,
        max_num_seqs=3,
        max_num_batched_tokens=3,
        chunk=2,
        order=config.Order.prefill_first,
        queue="priority",
    )
    for priority, name in enumerate("ab"):
        bench.add(name, 3, 4, priority)
    bench.step()
    bench.step()
    bench.add("low", 8, 2, 2)
    assert bench.step() == {"low": 2, "a": 1}
    # `low` has two of the three tokens again when a needs its block: b then has one, too.
    assert bench.step() == {"a": 1, "b": 1}
    bench.drain()
    assert bench.tokens == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "low": [0, 1]}


def test_waiting_and_unknown_requests_cannot_be_preempted():
    bench = Bench(2, max_num_seqs=1)
    bench.add("a", 4, 3)
    bench.add("b", 4, 3)
    bench.step()
    bench.scheduler.preempt("b")
    bench.scheduler.preempt("unknown")
    assert "preemptions" not in bench.counts() and len(bench.scheduler._waiting) == 1


def test_priority_decides_which_request_is_admitted():
    bench = Bench(8, max_num_seqs=1, queue="priority")
    for name, priority in (("low", 5), ("first", 1), ("second", 1), ("urgent", -3)):
        bench.add(name, 2, 2, priority)
    bench.drain()
    assert list(bench.tokens) == ["urgent", "first", "second", "low"]
    assert bench.counts()["queue.priority"] == 3


def test_first_come_first_served_ignores_priority():
    bench = Bench(8, max_num_seqs=1)
    for name, priority in (("low", 5), ("urgent", -3)):
        bench.add(name, 2, 2, priority)
    bench.drain()
    assert list(bench.tokens) == ["low", "urgent"]


def test_the_lowest_priority_is_preempted_whenever_it_was_admitted():
    bench = Bench(3, queue="priority")
    bench.add("low", 4, 5, 1)
    bench.step()
    bench.add("urgent", 3, 4, 0)
    # In the third of these steps `urgent` needs a block after `low`, first to run, has its chunk.
    assert [bench.step() for _ in range(3)][1:] == [{"low": 1, "urgent": 1}, {"urgent": 1}]
    assert bench.counts()["preemptions"] == 1
    bench.drain()
    assert bench.tokens == {"low": list(range(5)), "urgent": list(range(4))}


def test_no_block_is_lost_in_growth_and_preemption():
    bench = Bench(5)
    for i in range(12):
        bench.add(f"r{i}", 1 + i % 5, 3 + 2 * (i % 4))
    bench.drain()
    assert bench.counts()["preemptions"] > 0
    assert bench.cache.pool.num_free == bench.cache.pool.capacity
    assert all(tokens == list(range(len(tokens))) for tokens in bench.tokens.values())
