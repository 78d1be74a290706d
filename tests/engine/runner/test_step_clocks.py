"""Clocks say which part of a step took the time, and change nothing of the steps."""

import time

import pytest
from stub_engine import make_engine, request, run
from test_kv_layouts import prompts

from labkit import config
from labkit.doctor.engine_profile import profile
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import StepTiming
from labkit.engine.runner.step_clocks import (
    IDLE,
    LEFT,
    PARTS,
    STALLS,
    ClockedEngine,
    StepClocks,
)
from labkit.records import Record

DELAY = 1.0  # far more than the real time of a stub's step


class Hand:
    """A clock that only delays advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def delayed(self, call, seconds=DELAY):
        def slower(*arguments):
            self.now += seconds
            return call(*arguments)

        return slower


def serve(part, clock, pipeline="sync"):
    """Serve requests on a stub with a delay in one part of every step; tokens, note, steps."""
    engine, model = make_engine(16, proposer="ngram", pipeline=pipeline) if part == "draft" else (
        make_engine(16, pipeline=pipeline)
    )  # fmt: skip
    loop = engine._loop
    if part in loop._parts._fields:
        loop._parts = loop._parts._replace(**{part: clock.delayed(getattr(loop._parts, part))})
    elif part == "model":
        loop._launcher.run_model = clock.delayed(model)
    elif part == "idle":
        engine._loop.step = clock.delayed(loop.step)
    clocks = engine.time_steps(clock)
    clocked = ClockedEngine(engine, clocks, clock)
    clocked.check = lambda: setattr(clock, "now", clock.now + DELAY * (part == "left_over"))
    tokens, _ = run(clocked, [request(f"r{i}", range(5), 6) for i in range(4)])
    return tokens, clocks.report(), engine.counters()["steps.total"]


@pytest.mark.parametrize(
    "part", ["schedule", "draft", "build", "model", "sample", "update", "idle", "left_over"]
)
def test_a_delay_is_the_time_of_its_part(part):
    tokens, note, steps = serve(part, Hand())
    assert isinstance(make_engine()[0], StepTiming)
    assert tokens == serve("none", Hand())[0] or part == "draft"
    assert sum(note["steps"].values()) == steps and set(note["steps"]) == {"prefill", "decode"}
    times = {p: sum(us.get(p, 0.0) for us in note["parts_us"].values()) for p in PARTS}
    # Nothing follows the last step, and whether the thread waits is not known in the first one.
    expected = steps - (part in ("left_over", "idle"))
    if part == "idle":
        times["left_over"] -= DELAY * 1e6
    assert times.pop(part) == pytest.approx(expected * DELAY * 1e6, rel=0.01)
    assert sum(map(abs, times.values())) < 0.01 * expected * DELAY * 1e6
    assert 0 < note["clocks_us"] < 1e5


@pytest.mark.parametrize(("host_s", "bound"), [(0.25, "model"), (1.0, "neither"), (4.0, "host")])
def test_the_doctor_s_profile_is_right_on_host_delays_planted_into_an_engine(host_s, bound):
    clock = Hand()
    engine, model = make_engine(16)
    loop = engine._loop
    loop._parts = loop._parts._replace(schedule=clock.delayed(loop._parts.schedule, host_s / 2))
    loop._parts = loop._parts._replace(update=clock.delayed(loop._parts.update, host_s / 2))
    loop._launcher.run_model = clock.delayed(model)
    clocks = engine.time_steps(clock)
    clocked = ClockedEngine(engine, clocks, clock)
    clocked.check = lambda: None
    tokens, _ = run(clocked, [request("r", range(5), 6)])
    note = {**clocks.report(), "output_tokens": sum(map(len, tokens.values()))}
    when = "2026-11-20T20:00:00Z"
    record = Record("base", "baseline", 0, 0, 0, "ok", when, counters=engine.counters(),
                    notes={"step_parts": note})  # fmt: skip
    found = profile([record, record])
    assert found.bound == bound
    assert found.shares["host"].pct == pytest.approx(100 * host_s / (host_s + DELAY), rel=0.01)
    hidden = min(host_s, DELAY) / max(host_s, DELAY)
    assert found.gains["overlap"].pct == pytest.approx(100 * hidden, rel=0.02)


def test_an_overlapped_step_is_one_part():
    _, note, steps = serve("model", Hand(), "overlap")
    # The other thread may end before this one waits: then the part is absent.
    assert sum(us.get("model", 0.0) for us in note["parts_us"].values()) <= steps * DELAY * 1e6
    assert not any({"attention", "products", "rest"} & set(us) for us in note["parts_us"].values())


def test_stalls_are_apart_and_what_the_client_waits_is_none():
    clocks = StepClocks(Hand())
    for number in range(20):
        clocks._seconds[IDLE] = 0.05 * (number == 3)
        clocks.end_step(0.01 + 0.05 * (number == 3) + 5.0 * (number == 7), 5.0 * (number == 7))
    times = clocks.steps("decode")
    assert times[3, STALLS] == pytest.approx(0.05) and not times[4:, STALLS].any()
    assert times[:, IDLE].sum() == pytest.approx(5.0)
    assert times[:, LEFT] == pytest.approx(0.01)


def test_clocks_end_a_trace(model_dir):
    engine = create(config.Engine(budget=config.Budget(blocks=64)), model_dir("qwen3"))
    engine.trace_steps(9, lambda: pytest.fail("the trace goes on"))
    engine.time_steps(time.perf_counter)
    engine.submit(Request("r", prompts()[0], SamplingParams(max_tokens=2)))
    while engine.has_work():
        engine.step()
    assert engine.counters()["steps.total"] > 0


@pytest.mark.parametrize("rows", [3, 66])  # a larger step is not replayed
def test_a_forward_is_divided_and_has_the_same_tokens(model_dir, rows):
    def tokens(timed):
        scheduler = config.Scheduler(max_num_seqs=rows, max_num_batched_tokens=512)
        budget = config.Budget(blocks=256)
        engine = create(config.Engine(scheduler=scheduler, budget=budget), model_dir("qwen3"))
        clocks = engine.time_steps(time.perf_counter) if timed else None
        end, start = {}, time.perf_counter()
        served = ClockedEngine(engine, clocks, time.perf_counter) if timed else engine
        for i in range(rows):
            prompt = (*prompts()[0][:6], i)
            engine.submit(Request(f"r{i}", prompt, SamplingParams(max_tokens=4)))
        while engine.has_work():
            for event in served.step():
                end.setdefault(event.request_id, []).append(event.token)
        return end, clocks and clocks.report(), time.perf_counter() - start

    found, note, seconds = tokens(True)
    assert found == tokens(False)[0]
    whole = 0.0
    for kind, times in note["parts_us"].items():
        assert min(times[p] for p in ("attention", "products", "rest")) > 0, kind
        assert "model" not in times and all(us > 0 for us in times.values())
        whole += sum(times.values())
    assert whole <= seconds * 1e6
