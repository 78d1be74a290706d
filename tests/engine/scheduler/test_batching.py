"""Admission, order and composition decide which tokens a step computes."""

import pytest

from labkit import config
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler

STATIC = {"admission": config.Admission.static, "order": config.Order.prefill_first}
SPLIT = {"composition": config.Composition.split}
PREFILL_FIRST = {"order": config.Order.prefill_first}


class Bench:
    """A scheduler whose steps are shown as ``{request: tokens}``."""

    def __init__(self, **options):
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 8} | options
        cache = PagedKVCacheManager(BlockPool(50, 4))
        self.scheduler = Scheduler(config.Scheduler(**options), cache, frozenset())

    def add(self, name, prompt, outputs):
        params = SamplingParams(max_tokens=outputs)
        self.scheduler.add(Request(name, tuple(range(prompt)), params))

    def step(self):
        output = self.scheduler.schedule()
        sampled = {c.state.request_id: [Sampled(1, None)] for c in output.chunks if c.samples}
        kinds = [chunk.is_prefill for chunk in output.chunks]
        assert kinds == sorted(kinds), "decodes are packed first"
        shown = {chunk.state.request_id: chunk.num_tokens for chunk in output.chunks}
        self.scheduler.update(output, sampled)
        self.scheduler.check()
        return shown

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def counts(self):
        return self.scheduler.counts.as_dict()


def test_a_static_batch_is_admitted_whole_and_runs_until_all_end():
    bench = Bench(**STATIC, max_num_seqs=2)
    for name, outputs in (("a", 3), ("b", 1), ("c", 1)):
        bench.add(name, 6, outputs)
    # The token budget holds 8 of the batch's 12 tokens: b joins nevertheless.
    assert bench.step() == {"a": 6, "b": 2}
    assert len(bench.scheduler._running) == 2
    assert bench.steps(2) == [{"b": 4, "a": 1}, {"a": 1}]
    assert bench.step() == {"c": 6}
    assert bench.counts()["admission.static"] == 3


def test_a_continuous_request_replaces_a_finished_one():
    bench = Bench(max_num_seqs=2)
    for name, outputs in (("a", 3), ("b", 1), ("c", 1)):
        bench.add(name, 4, outputs)
    assert bench.steps(2) == [{"a": 4, "b": 4}, {"a": 1, "c": 4}]


def test_continuous_admission_holds_no_blocks_before_there_are_tokens_for_them():
    bench = Bench()
    bench.add("a", 20, 1)
    bench.add("b", 4, 1)
    bench.step()
    assert len(bench.scheduler._running) == 1


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # Decodes first: `a` advances in every step.
        ({}, [{"a": 1, "b": 7}, {"a": 1, "b": 7}]),
        # Prompts first: `a` waits while a prompt fills the step.
        (PREFILL_FIRST, [{"b": 8}, {"b": 8}]),
    ],
)
def test_order_decides_which_requests_use_the_budget_first(order, expected):
    bench = Bench(**order)
    bench.add("a", 2, 9)
    bench.step()
    bench.add("b", 40, 2)
    assert bench.steps(2) == expected
    name = order.get("order", config.Order.decode_first).value
    assert bench.counts()[f"order.{name}"] == 2


def test_prompts_first_leaves_the_rest_to_decodes():
    bench = Bench(**PREFILL_FIRST)
    bench.add("a", 2, 9)
    bench.step()
    bench.add("b", 7, 2)
    assert bench.step() == {"a": 1, "b": 7}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # Turns: a step of decodes, a step of prompts.
        ({}, [{"b": 8}, {"a": 1}, {"b": 8}, {"a": 1}, {"b": 4}, {"a": 1, "b": 1}]),
        # Every prompt before any decode.
        (PREFILL_FIRST, [{"b": 8}, {"b": 8}, {"b": 4}, {"a": 1, "b": 1}]),
    ],
)
def test_split_keeps_prefill_out_of_decode_steps(order, expected):
    bench = Bench(**SPLIT, **order)
    bench.add("a", 2, 9)
    bench.steps(2)
    bench.add("b", 20, 9)
    assert bench.steps(len(expected)) == expected
    assert bench.counts()["composition.split"] > 0


def test_a_last_prompt_token_alone_is_still_prefill():
    bench = Bench(**SPLIT, max_num_batched_tokens=4)
    bench.add("a", 1, 9)
    bench.step()
    bench.add("b", 5, 2)
    assert bench.steps(4) == [{"a": 1}, {"b": 4}, {"a": 1}, {"b": 1}]


def test_steps_without_a_choice_are_not_counted():
    bench = Bench(**SPLIT)
    bench.add("a", 3, 4)
    bench.steps(4)
    assert not any(name.startswith(("order.", "composition.")) for name in bench.counts())


def test_a_static_chunk_cap_holds_for_each_request():
    bench = Bench(chunk=3)
    bench.add("a", 6, 3)
    bench.add("b", 3, 3)
    assert bench.steps(2) == [{"a": 3, "b": 3}, {"b": 1, "a": 3}]
    assert bench.counts()["chunk.static"] == 1


@pytest.mark.parametrize(
    ("chunk", "prompt"),
    [(8, 20), (6, 6), (6, 3)],  # the budget cuts the prompt; nothing does
)
def test_a_cap_that_cuts_nothing_is_not_counted(chunk, prompt):
    bench = Bench(chunk=chunk)
    bench.add("a", prompt, 3)
    bench.steps(4)
    assert not any(name.startswith("chunk.") for name in bench.counts())


def test_a_shrinking_chunk_gives_a_token_for_each_decode():
    bench = Bench(chunk=5, chunk_policy=config.ChunkPolicy.shrinking, max_num_batched_tokens=16)
    bench.add("a", 2, 9)
    bench.add("b", 2, 9)
    bench.step()
    bench.add("c", 7, 9)
    assert bench.steps(3) == [
        {"a": 1, "b": 1, "c": 3},
        {"a": 1, "b": 1, "c": 3},
        {"a": 1, "b": 1, "c": 1},
    ]
    assert bench.counts()["chunk.shrinking"] == 2


def test_recomputed_generated_tokens_count_as_prefill():
    bench = Bench(**SPLIT, chunk=3)
    for name in "ab":
        bench.add(name, 2, 20)
    bench.steps(6)
    bench.scheduler.preempt("b")
    # b has 2 prompt tokens and 6 others to compute again: in chunks of its own steps.
    shown = bench.steps(5)
    assert [step for step in shown if "b" in step] == [{"b": 3}, {"b": 3}, {"b": 2}]
    assert bench.step() == {"a": 1, "b": 1}
