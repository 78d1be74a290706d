"""Scheduler states that a synchronous engine never reaches, tested on the scheduler alone."""

import pytest

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import NO_TOKEN, Counters, TokenEvent
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler, scheduling_policies
from labkit.engine.scheduler.scheduler_output import PrefillShare, ScheduledChunk, StepBuilder


def make_scheduler(**options):
    return Scheduler(
        config.Scheduler(**options), PagedKVCacheManager(BlockPool(20, 4)), frozenset()
    )


def test_a_request_that_cannot_be_sampled_ends_with_an_error_event():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=2)))
    failed = Sampled(NO_TOKEN, None, error="too complex")
    events = scheduler.update(scheduler.schedule(), {"a": [failed], "b": [Sampled(6, 0.1)]})
    assert events[0] == TokenEvent("a", NO_TOKEN, "error", error="too complex")
    assert events[1].finish_reason is None
    assert not scheduler.is_live("a") and scheduler.is_live("b")
    scheduler.check()


def test_a_result_for_a_request_aborted_in_flight_is_dropped():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=2)))
    output = scheduler.schedule()
    scheduler.abort("a")
    events = scheduler.update(output, {"a": [Sampled(5, 0.1)], "b": [Sampled(6, 0.1)]})
    assert [event.request_id for event in events] == ["b"]
    scheduler.check()


class FailingPolicy:
    name = "failing"

    def eviction_key(self, prefix):
        raise ZeroDivisionError


@pytest.mark.parametrize(("method", "live"), [("abort", False), ("preempt", True)])
def test_a_failing_eviction_policy_leaves_no_request_between_two_states(method, live):
    pool = BlockPool(20, 4)
    manager = PagedKVCacheManager(pool, prefix_cache.create("hash", pool, FailingPolicy()), 1)
    scheduler = Scheduler(config.Scheduler(), manager, frozenset())
    for name, tokens in (("a", (1,) * 5), ("b", (2,) * 5)):
        scheduler.add(Request(name, tokens, SamplingParams(max_tokens=2)))
    scheduler.update(scheduler.schedule(), {"a": [Sampled(5, 0.1)], "b": [Sampled(6, 0.1)]})
    with pytest.raises(ZeroDivisionError):
        getattr(scheduler, method)("a")
    scheduler.check()
    assert scheduler.is_live("a") is live and not scheduler.is_running("a")
    scheduler.close()
    assert not scheduler.has_work() and pool.num_free == 20 - 1 - pool.num_evictable


def test_decodes_come_first_whatever_the_order_of_arrival():
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=6)
    scheduler.add(Request("long", tuple(range(20)), SamplingParams(max_tokens=2)))
    output = scheduler.schedule()
    assert [chunk.num_tokens for chunk in output.chunks] == [6]
    scheduler.update(output, {})
    scheduler.abort("long")
    scheduler.add(Request("short", (1, 2), SamplingParams(max_tokens=9)))
    scheduler.add(Request("late", tuple(range(20)), SamplingParams(max_tokens=2)))
    output = scheduler.schedule()
    assert [(c.state.request_id, c.num_tokens) for c in output.chunks] == [
        ("short", 2),
        ("late", 4),
    ]
    scheduler.update(output, {"short": [Sampled(7, None)]})
    scheduler.add(Request("later", (3,), SamplingParams(max_tokens=1)))
    output = scheduler.schedule()
    chunks = [(c.state.request_id, c.start, c.num_tokens) for c in output.chunks]
    assert chunks == [("short", 2, 1), ("late", 4, 5)]
    assert output.total_tokens == 6


def test_the_worked_example_of_a_prompt_that_exceeds_the_budget():
    """The table in the docstring of ``labkit.engine.scheduler.scheduler``."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=8)
    scheduler.add(Request("a", (1,), SamplingParams(max_tokens=9)))
    scheduler.update(scheduler.schedule(), {"a": [Sampled(7, None)]})
    scheduler.add(Request("b", tuple(range(20)), SamplingParams(max_tokens=9)))
    tokens, samples = {"a": [], "b": []}, {"a": [], "b": []}
    for _ in range(4):
        output = scheduler.schedule()
        for chunk in output.chunks:
            tokens[chunk.state.request_id].append(chunk.num_tokens)
            samples[chunk.state.request_id].append(chunk.samples)
        sampling = [c.state.request_id for c in output.chunks if c.samples]
        scheduler.update(output, {name: [Sampled(7, None)] for name in sampling})
    assert tokens == {"a": [1, 1, 1, 1], "b": [7, 7, 6, 1]}
    assert samples["b"] == [False, False, True, True]


def _mixed(decodes, prompts, **options):
    """Return the prompt tokens of a step beside so many decodes, of so many prompts of 20."""
    manager = PagedKVCacheManager(BlockPool(200, 4))
    scheduler = Scheduler(config.Scheduler(**options), manager, frozenset())
    for index in range(decodes):
        scheduler.add(Request(f"d{index}", (1,), SamplingParams(max_tokens=9)))
    output = scheduler.schedule()
    while output and len(output.chunks) < decodes:
        scheduler.update(output, {c.state.request_id: [Sampled(1, None)] for c in output.chunks})
        output = scheduler.schedule()
    scheduler.update(output, {c.state.request_id: [Sampled(1, None)] for c in output.chunks})
    for index in range(prompts):
        scheduler.add(Request(f"p{index}", tuple(range(20)), SamplingParams(max_tokens=2)))
    before = scheduler.counts.as_dict()
    chunks = scheduler.schedule().chunks
    scheduler.check()
    counts = {k: v - before.get(k, 0) for k, v in scheduler.counts.as_dict().items()}
    assert sum(c.num_tokens for c in chunks if not c.is_prefill) == decodes
    return [c.num_tokens for c in chunks if c.is_prefill], counts


def test_prefill_cap_limits_all_prompts_of_a_step():
    """0013 caps prefill whatever decodes, over all prompts; a chunk caps each of them."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 40}
    prefill_tokens, counts = _mixed(4, 2, **sizes)
    assert prefill_tokens == [20, 16] and not counts.get("steps.prefill_capped")
    for decodes in (1, 4):
        prefill_tokens, counts = _mixed(decodes, 2, **sizes, prefill_cap=24)
        assert prefill_tokens == [20, 4] and counts["steps.prefill_capped"] == 1
    prefill_tokens, counts = _mixed(4, 2, **sizes, prefill_cap=24, chunk=10)
    assert prefill_tokens == [10, 10] and not counts.get("steps.prefill_capped")


def test_prefill_floor_leaves_room_for_prompts():
    """0016 leaves prompts what decodes leave, but never less than its floor."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 8}
    assert _mixed(6, 1, **sizes)[0] == [2]
    prefill_tokens, counts = _mixed(6, 1, **sizes, prefill_floor=5)
    assert prefill_tokens == [5] and counts["steps.prefill_floored"] == 1
    prefill_tokens, counts = _mixed(1, 1, **sizes, prefill_floor=5)
    assert prefill_tokens == [7] and not counts.get("steps.prefill_floored")
    assert _mixed(6, 1, **sizes, prefill_floor=5, prefill_cap=6)[0] == [5]
    assert config.Scheduler(**sizes, prefill_floor=5).max_step_tokens == 7 + 5
    assert config.Scheduler(**sizes, prefill_floor=8).max_step_tokens == 7 + 8


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"prefill_floor": 9, "prefill_cap": 8},
            "at most 8, the smaller of engine.scheduler.max_num_batched_tokens",
        ),
        ({"prefill_floor": 600}, "prefill_floor=600: must be at most"),
        (
            {"prefill_floor": 9, "composition": config.Composition.split},
            "prompts have their own steps",
        ),
        ({"prefill_floor": 9, "order": config.Order.prefill_first}, "does not read it"),
    ],
)
def test_a_prefill_floor_without_effect_is_refused(options, reason):
    with pytest.raises(config.ConfigError, match=reason):
        config.Scheduler(**options)


def test_a_request_whose_last_token_is_in_flight_is_not_scheduled():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    for name, prompt in (("last", 2), ("long", 20), ("waits", 1)):
        scheduler.add(Request(name, tuple(range(prompt)), SamplingParams(max_tokens=1)))
    scheduler.schedule()
    output = scheduler.schedule()  # as under overlap, before the first step's results
    assert [(c.state.request_id, c.num_tokens) for c in output.chunks] == [("long", 8)]
    assert not any(name.startswith("order.") for name in scheduler.counts.as_dict())
    assert len(scheduler._running) == 2  # it has its place still


@pytest.mark.parametrize(("start", "count"), [(0, 0), (2, 2), (3, 1)])
def test_a_chunk_beyond_the_known_tokens_cannot_be_made(start, count):
    state = RequestState(Request("a", (1, 2, 3)))
    with pytest.raises(ValueError, match="cannot be scheduled"):
        ScheduledChunk(state, start, count)


def test_decisions_become_counters_of_the_options_that_made_a_difference():
    counts, policies = Counters(), scheduling_policies.select(config.Scheduler(chunk=4))
    state = RequestState(Request("a", (1, 2, 3)))
    step = StepBuilder(4, [])
    step.pending, step.num_tokens = [[state], [state]], 4
    step.num_admitted, step.num_by_queue, step.most_running, step.num_capped = 2, 1, 5, 3
    step.prefill_share = PrefillShare(left=9, budget=4, spent=4)
    scheduling_policies.count_decisions(counts, policies, step)
    assert counts.as_dict() == {
        "order.decode_first": 1, "composition.mixed": 1, "admission.continuous": 2,
        "reservation.full": 2, "requests.most_running": 5, "queue.fcfs": 1, "chunk.static": 3,
        "steps.prefill_capped": 1, "steps.full": 1,
    }  # fmt: skip
    usual = StepBuilder(4, [])
    usual.prefill_share = PrefillShare(9, 9, 3)
    scheduling_policies.count_decisions(counts, policies, usual)
    assert counts.as_dict()["order.decode_first"] == 1


def test_a_step_of_decodes_with_room_left_decided_nothing():
    scheduler = make_scheduler()
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)))
    scheduler.update(scheduler.schedule(), {"a": [Sampled(5, 0.1)]})
    before = scheduler.counts.as_dict()
    assert scheduler.schedule().is_decode_only and scheduler.counts.as_dict() == before
