"""Turns with clocks follow the measurement and decide nothing; studies name what was planted."""

import random
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from labkit.analysis.comparison.arm_comparison import DecisionCriteria
from labkit.analysis.comparison.step_parts import divide_time
from labkit.config import Workload
from labkit.records import Arm, Record
from labkit.workload.arm_clocks import ArmClock
from labkit.workload.requests import interleaved_serving_arms, post_run_profiling
from labkit.workload.requests.interleaved_serving_arms import InterleavedServing, ServingArm
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.turn_order import RandomTurnOrder

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from stub_engine import make_engine

# Seconds of the parts of a step; the model's are for each row.
PARTS = {"schedule": 0.0004, "build": 0.0002, "sample": 0.0008, "update": 0.0003}
MODEL_S, STEP_S = 0.003, 0.02
PROMPTS = [Prompt(f"r{i}", (1, 2, 3, i), 12) for i in range(4)]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Leave out what takes 0.1 s in each process."""
    monkeypatch.setattr(interleaved_serving_arms.gc, "collect", lambda: 0)


class Machine:
    """A clock that the parts of steps advance, each with noise of its own."""

    def __init__(self, seed):
        self.now, self.rng = 0.0, np.random.default_rng(seed)

    def __call__(self):
        return self.now

    def spend(self, call, seconds):
        def spent(*arguments):
            self.now += seconds(*arguments) * self.rng.lognormal(0.0, 0.3)
            return call(*arguments)

        return spent

    def engine(self, planted):
        """An engine whose ``planted`` part takes 5 % of a step longer."""
        shape = "fixed" if planted == "padding" else "exact"
        engine, model = make_engine(40, max_num_seqs=4, shape=shape)
        loop = engine._loop
        more = {planted: 0.05 * STEP_S}
        for part, seconds in PARTS.items():
            took = seconds + more.get(part, 0.0)
            call = self.spend(getattr(loop._parts, part), lambda *_, s=took: s)
            loop._parts = loop._parts._replace(**{part: call})
        whole = MODEL_S * (1 + 0.25 * (planted == "model"))
        loop._launcher.run_model = self.spend(model, lambda batch: whole * batch.total_q)
        if planted == "idle":
            loop.step = self.spend(loop.step, lambda: more["idle"])
        return engine


def process(seed, *planted, concurrency=3):
    """Measure an arm for each plant in turns, as a process does."""
    machine = Machine(seed)
    workload = Workload(name="test", kind="requests", concurrency=concurrency, warmup=1)
    arms = []
    for plant in planted:
        clock = ArmClock(machine)
        session = ServingSession(
            machine.engine(plant), PROMPTS, workload, seed=5, vocab_size=20, clock=clock
        )
        arms.append(ServingArm(session, clock))
    order = RandomTurnOrder(random.Random(seed))
    turns = InterleavedServing(arms, order, lambda arm: nullcontext())
    turns.warm_up()
    return turns.measure(lambda text: None)


def study(planted, blocks=7):
    """Return the division of the time of a study with two arms, the second planted."""
    records = [
        Record(
            name, role, block, position, 0, "ok", "2026-11-20T20:00:00Z",
            counters=one.counters, cases=one.cases, notes=one.notes,
        )
        for block in range(blocks)
        for position, (name, role, one) in enumerate(
            zip(("base", "arm"), ("baseline", "arm"), process(block, None, planted), strict=True)
        )
    ]  # fmt: skip
    arms = [Arm("base", "baseline", {}, {}), Arm("arm", "arm", {}, {})]
    return divide_time(arms, records, DecisionCriteria(1, 0.05, 2.0), {"arm"})


@pytest.mark.parametrize(
    "planted", ["schedule", "build", "sample", "update", "model", "idle", "padding", None]
)
def test_a_study_names_the_planted_cause_first(planted):
    division = study(planted)
    (arm,) = division.arms
    assert arm.cause == planted
    assert arm.total.pct is not None and (arm.total.pct > 2) == (planted is not None)
    shares = [share.pct for share in division.baseline if share.part != "stalls"]
    assert sum(shares) == pytest.approx(100.0)
    assert any("padding" in text for text in arm.counts) == (planted == "padding")


def test_the_measurement_is_the_same_without_turns_with_clocks(monkeypatch):
    clocked = process(3, None, "schedule")
    monkeypatch.setattr(ServingSession, "has_clocks", False)
    plain = process(3, None, "schedule")
    for one, other in zip(clocked, plain, strict=True):
        assert one.notes.pop("step_parts")["output_tokens"] == 48
        one.notes.pop("timeline"), other.notes.pop("timeline")  # has real times
        one.counters.pop("step_ms"), other.counters.pop("step_ms")
        assert one.cases[0].outputs == other.cases[0].outputs
        ours, theirs = (
            {m.name: m.repeats for m in x.cases[0].metrics if "host" not in m.name}
            for x in (one, other)
        )
        assert ours == theirs and one.notes == other.notes


def test_turns_with_clocks_end_with_a_share_of_the_tokens(monkeypatch):
    monkeypatch.setattr(post_run_profiling, "MIN_TOKENS", 20)
    (one,) = process(4, None)
    assert 20 <= one.notes["step_parts"]["output_tokens"] < 48
