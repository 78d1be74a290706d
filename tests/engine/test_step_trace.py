"""A trace says what the engine did, in every mode, and changes nothing of it."""

import itertools
import random

import pytest
from stub_engine import Adversary, make_engine, request, run, solo
from test_kv_layouts import options, prompts

from labkit import config
from labkit.engine import Request, SamplingParams, create, step_trace
from labkit.engine.engine_protocol import StepTracing
from labkit.engine.step_loop import StepLoop
from labkit.records.step_trace_file import SCHEMA_VERSION, _check

PARTS = ("schedule", "draft", "build", "plan", "forward", "sample", "update")
MODES = {
    "sync": {},
    "overlap": {"pipeline": "overlap"},
    "preemption": {"reservation": config.Reservation.optimistic, "watermark": 0},
    "preemption, overlap": {
        "reservation": config.Reservation.optimistic, "watermark": 0, "pipeline": "overlap",
    },
    "hash": {"prefixes": "hash"},
    "radix, preemption": {
        "prefixes": "radix", "reservation": config.Reservation.optimistic, "watermark": 0,
    },
    "drafts": {"proposer": "adversary"},
    "drafts, staircase": {"proposer": "adversary", "cut": "staircase"},
    "padded decodes": {"shape": "bucketed"},
}  # fmt: skip


def make(mode, num_blocks=16, **more):
    chosen = {**MODES[mode], "max_num_seqs": 4, "max_num_batched_tokens": 9, **more}
    if chosen.get("proposer") == "adversary":
        chosen["proposer"] = Adversary()
    return make_engine(num_blocks, **chosen)[0]


def requests(seed=0, count=12):
    draw = random.Random(seed)
    shared = [draw.randrange(20) for _ in range(12)]
    return [
        request(f"r{i}", [*shared[: draw.choice((0, 8, 12))], i, *range(draw.randint(0, 9))],
                draw.randint(1, 14))
        for i in range(count)
    ]  # fmt: skip


def watch(engine, monkeypatch):
    """Note the block tables after every schedule, apart from the trace."""
    seen, scheduler = [], engine._scheduler
    schedule = scheduler.schedule

    def noting():
        output = schedule()
        if output:
            tables = engine._cache._tables.items()
            seen.append({name: table.block_ids.tolist() for name, table in tables})
        return output

    monkeypatch.setattr(scheduler, "schedule", noting)
    return seen


def replay(report):
    """Return the block tables at every step, from the changes that the trace has."""
    names, tables, states = [entry["id"] for entry in report["requests"]], {}, []
    for step in report["steps"]:
        for index in step["released"]:
            del tables[names[index]]
        for index, same, ids in step["blocks"]:
            tables[names[index]] = tables.get(names[index], [])[:same] + ids
        states.append(dict(tables))
    return states


@pytest.mark.parametrize("mode", MODES)
def test_the_trace_is_what_the_engine_did(mode, monkeypatch):
    engine = make(mode)
    seen = watch(engine, monkeypatch)
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    sent = requests()
    tokens, _ = run(engine, sent)
    assert tokens == {
        one.request_id: solo(one.prompt_token_ids, one.params.max_tokens) for one in sent
    }
    report, counters = trace.report(), engine.counters()
    steps = report["steps"]
    _check({"schema_version": SCHEMA_VERSION, **report})
    assert len(steps) == report["steps_total"] == counters["steps.total"] == len(seen) > 20
    assert replay(report) == seen

    def total(value):
        return sum(map(value, steps))

    def chunk_tokens(prefill):
        return total(lambda s: sum(c[2] for c in s["chunks"] if c[3] == prefill))

    drafted = total(lambda s: sum(d[1] for d in s["drafts"]))
    assert chunk_tokens(1) == counters["tokens.prefill"]
    assert chunk_tokens(0) + drafted == counters["tokens.decode"]
    assert drafted == counters.get("spec.drafted", 0)
    assert total(lambda s: sum(d[2] for d in s["drafts"])) == counters.get("spec.accepted", 0)
    assert total(lambda s: len(s["preempted"])) == counters["preemptions"]
    assert total(lambda s: s["padding"]) == counters["tokens.padded"]
    assert total(lambda s: sum(c[4] for c in s["chunks"])) >= sum(map(len, tokens.values())) - (
        counters.get("spec.accepted", 0)
    )
    for step in steps:
        lengths = sum(c[2] for c in step["chunks"]) + sum(d[1] for d in step["drafts"])
        assert step["cu_seqlens_q"][-1] == lengths + step["padding"]
    expected = {"preemption": counters["preemptions"], "drafts": drafted,
                "hash": counters["prefix.hit_tokens"], "radix": counters["prefix.hit_tokens"],
                "padded": counters["tokens.padded"]}  # fmt: skip
    for word, number in expected.items():
        assert (number > 0) >= (word in mode), (mode, word)


@pytest.mark.parametrize("mode", ["hash", "radix, preemption", "preemption"])
def test_blocks_and_hits_add_up(mode, monkeypatch):
    engine = make(mode)
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    run(engine, requests(1))
    report, counters = trace.report(), engine.counters()
    admitted, hits = set(), 0  # a request that was preempted may find its own tokens
    for step, tables in zip(report["steps"], replay(report), strict=True):
        held = {block for blocks in tables.values() for block in blocks}
        assert (
            len(held) == report["num_blocks"] - 1 - step["free_blocks"] - step["evictable_blocks"]
        )
        assert step["reserved_bytes"] == len(held) * 100  # bytes of the stub's blocks
        for index, start, *_ in step["chunks"]:
            if index not in admitted:
                admitted.add(index)
                hits += start
    assert hits == counters.get("prefix.hit_tokens", 0)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_parts_of_a_step_follow_each_other(mode):
    engine = make(mode)
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    run(engine, requests(2))
    before = 0
    for step in trace.report()["steps"]:
        spans = {part: (start, start + took) for part, (start, took) in step["times_us"].items()}
        assert set(spans) == set(PARTS) - {"plan"}  # the stub plans no attention
        assert (
            spans["schedule"][0] <= spans["draft"][0] <= spans["draft"][1] <= spans["schedule"][1]
        )
        order = [spans[part] for part in ("schedule", "build", "forward", "sample", "update")]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(order))
        assert all(start < end for start, end in order)
        assert order[0][0] >= before
        before = order[0][1]


def test_a_trace_is_bounded(monkeypatch):
    engine = make("preemption")
    trace = engine.trace_steps(5, itertools.count().__next__)
    run(engine, requests())
    report = trace.report()
    assert len(report["steps"]) == 5 and report["steps_total"] == engine.counters()["steps.total"]
    assert not trace._open
    monkeypatch.setattr(step_trace, "MAX_CHUNKS", 7)
    engine = make("sync")
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    run(engine, requests())
    chunks = [len(step["chunks"]) for step in trace.report()["steps"]]
    assert 0 < sum(chunks) <= 7 and not trace._open


def test_a_step_that_was_dropped_gets_nothing_of_later_ones():
    free = solo([3, 1, 4], 12)
    engine = make("overlap", max_num_seqs=1)
    trace = engine.trace_steps(free.index(free[3]) + 2, itertools.count().__next__)
    run(engine, [request("a", [3, 1, 4], 12, stop_token_ids=(free[3],))])
    engine.counters()  # waits for the last step
    report = trace.report()
    assert "update" not in report["steps"][-1]["times_us"]  # its one row was computed in vain
    for index in range(50):
        run(engine, [request(f"r{index}", [index], 9)])
    assert trace.report()["steps"] == report["steps"]


def test_without_a_trace_none_of_it_runs():
    engine = make("sync")
    assert type(engine._loop) is StepLoop and isinstance(engine, StepTracing)
    run(engine, requests())
    assert type(engine._loop) is StepLoop
    assert not hasattr(engine._loop._launcher.run_model, "memory")


@pytest.mark.parametrize("preset", ["naive", "padded", "contiguous", "gather"])
def test_every_layout_is_traced(preset, model_dir):
    engine = create(options(preset), model_dir("qwen3"))
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    for index, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=3 + index % 4, ignore_eos=True)
        engine.submit(Request(f"r{index}", prompt, params))
    while engine.has_work():
        engine.step()
    report, counters = trace.report(), engine.counters()
    _check({"schema_version": SCHEMA_VERSION, **report})
    steps = report["steps"]
    assert len(steps) == counters["steps.total"]
    assert sum(step["padding"] for step in steps) == counters["tokens.padded"]
    assert all(set(step["times_us"]) == set(PARTS) for step in steps)
    assert any(step["lingering"] for step in steps) == (preset == "naive")
    if preset == "gather":
        assert report["block_size"] == 16 and not any(step["slots"] for step in steps)
    else:
        assert report["num_blocks"] is None
        held = [slots for step in steps for _, slots in step["slots"]]
        assert held and all(slots % 256 == 0 for slots in held)
    engine.close()
