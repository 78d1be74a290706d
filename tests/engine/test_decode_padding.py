"""Padding rows of decode steps: their number, their counters, and no effect on other rows."""

import numpy as np
import pytest
from stub_engine import make_engine, request, run, solo

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.block_pool import NULL_BLOCK, BlockPool
from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import RequestState
from labkit.engine.runner.decode_padding import DecodePadding
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput

SHAPES = ["exact", "bucketed", "fixed"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("exact", [1, 2, 3, 5, 9, 12]),
        ("bucketed", [1, 2, 4, 8, 12, 12]),
        ("fixed", [12] * 6),
        ("captured", [2, 2, 6, 6, 9, 12]),
    ],
)
def test_padded_rows_of_a_step(name, rows):
    padding = DecodePadding(config.DecodeShape(name), 12, Counters(), [2, 6, 16])

    def padded(needed):
        states = [RequestState(Request(f"r{i}", (1,))) for i in range(needed)]
        cache = PagedKVCacheManager(BlockPool(needed + 1, 8))
        for state in states:
            state.token_ids.append(2)
            cache.reserve(state, 2)
        step = SchedulerOutput(tuple(ScheduledChunk(state, 1, 1) for state in states))
        return len(padding.pad(InputBuilder(cache).build(step)).tokens)

    assert [padded(needed) for needed in (1, 2, 3, 5, 9, 12)] == rows
    assert padded(20) == 20  # a step with more rows than there can be is left alone


@pytest.mark.parametrize("name", SHAPES)
def test_padding_and_repeated_shapes_are_counted(name):
    engine, model = make_engine(40, shape=name, max_num_seqs=4)
    requests = [request(f"r{i}", [i, 1, 2], 3 + 2 * i) for i in range(3)]
    tokens, _ = run(engine, requests)
    assert tokens == {f"r{i}": solo([i, 1, 2], 3 + 2 * i) for i in range(3)}
    # A prefill of 9 tokens, then 3 requests for 2 steps, 2 for 2 and 1 for 2.
    exact = [3, 3, 2, 2, 1, 1]
    rows = {"exact": exact, "bucketed": [4, 4, 2, 2, 1, 1], "fixed": [4] * 6}[name]
    assert model.shapes == [9, *rows]
    counters = engine.counters()
    assert counters["tokens.padded"] == sum(rows) - sum(exact)
    assert counters["tokens.computed"] == 9 + sum(exact)
    assert counters[f"decode_shape.{name}"] == counters["steps.decode"] == 6
    assert counters["pipeline.sync"] == counters["speculation.none"] == counters["steps.total"]
    assert counters["shape.new"] == 1 + len(set(rows))
    assert counters["shape.reused"] == 6 - len(set(rows))
    assert counters["shape.repeated"] == 6 - len(set(rows))
    assert counters["shape.same_requests"] == 3  # a request ends after every second step


def test_steps_with_prompt_tokens_are_never_padded():
    engine, model = make_engine(40, shape="fixed", max_num_seqs=4, max_num_batched_tokens=6)
    run(engine, [request("a", [1], 8), request("b", range(12), 1)])
    assert model.shapes == [6, 6, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("cut", ["window", "staircase"])
def test_a_fixed_step_has_room_for_every_draft(cut):
    engine, model = make_engine(
        60, shape="fixed", proposer="ngram", cut=cut, num_drafts=3, max_num_seqs=2
    )
    tokens, _ = run(engine, [request("a", [1, 2, 1], 30), request("b", [3, 4], 30)])
    assert tokens == {"a": solo([1, 2, 1], 30), "b": solo([3, 4], 30)}
    counters = engine.counters()
    assert set(model.shapes[1:]) == {8} and counters["spec.accepted"] > 0
    assert counters["spec.unit_segments"] == (counters["spec.drafted"] if cut == "staircase" else 0)


def serve(engine, prompts, max_tokens=14):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, params))
    events = []
    while engine.has_work():
        for pool in poison(engine):
            pool[NULL_BLOCK] = np.nan
        events += engine.step()
    return [(event.request_id, event.token, event.margin) for event in events]


def poison(engine):
    backend = engine._loop._launcher.run_model.memory.attention
    return [*backend.keys, *backend.values]


@pytest.mark.parametrize("backend", ["fused", "reference", "gather"])
def test_padding_rows_change_no_bit_and_read_nothing(backend, model_dir):
    """The null block holds NaN before every step; tokens and margins are those of exact."""
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(0, 298, n).tolist()) for n in (3, 17, 8)]
    results = {}
    for name in SHAPES:
        options = config.Engine(
            scheduler=config.Scheduler(max_num_seqs=8, max_num_batched_tokens=64),
            kv=config.KV(block_size=8),
            budget=config.Budget(blocks=32),
            attention=config.Attention(backend=backend),
            decode_shape=config.DecodeShape(name),
        )
        engine = create(options, model_dir("qwen3"))
        results[name] = serve(engine, prompts)
        assert (engine.counters()["tokens.padded"] > 0) == (name != "exact")
        # Padding writes the null block's first slot, and that alone.
        assert all(np.isnan(np.asarray(pool[NULL_BLOCK, 1:])).all() for pool in poison(engine))
    assert all(np.isfinite(margin) for _, _, margin in results["exact"])
    assert results["bucketed"] == results["exact"] == results["fixed"]
