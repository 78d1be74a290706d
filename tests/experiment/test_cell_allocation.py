"""Blocks and rounds that follow from the time of a cell."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict, replace

import pytest
from planted_runs import OUTPUTS, PlantedRuns, kernel_fields

from labkit.analysis.robustness.caveats import caveats
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.config import ConfigError, Isolation
from labkit.experiment.cell import BlockPlan
from labkit.experiment.progress_display import Progress
from labkit.experiment.schedule import cell_allocation
from labkit.experiment.schedule.cell_allocation import BlockTimer, with_allocation
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.schedule.time_allocation import CasePilot, CellPilot
from labkit.records import CaseRecord, Metric, read_cell, read_runs

COSTS = {"clear": (0.02, 0.02), "noisy": (0.02, 0.05), "heavy": (1.5, 0.2)}  # round_s, sd


class Piloted(PlantedRuns):
    """Arm seq_map is slower in the case "clear"; runs have the rounds that their arms name."""

    def __init__(self, pilot=True):
        super().__init__()
        cases = (CasePilot(name, s, s, sd, 20) for name, (s, sd) in COSTS.items())
        self.costs = asdict(CellPilot(0.5, tuple(cases))) if pilot else None
        self.pilots, self.rounds = [], {}

    def pilot(self, cell, seconds):
        self.pilots.append(seconds)
        assert {case["factor"] for case in cell.arms[0].config["workload"]["cases"]} == {1}
        return self.costs

    def record(self, run, cell):
        workload = cell.arm(run.arm).config["workload"]
        cases = []
        for case in workload["cases"]:
            if case["name"] not in COSTS:
                cases.append(CaseRecord(case["name"], skipped="too large"))
                continue
            count = workload["repeats"] * case["factor"]
            self.rounds.setdefault(case["name"], {})[run.block] = count
            noise = random.Random(f"{run.name}/{case['name']}")
            shift = 0.2 if (run.arm, case["name"]) == ("seq_map", "clear") else 0.0
            sd = {"clear": 0.01, "noisy": 0.3, "heavy": 0.3}[case["name"]]
            times = [100 * math.exp(noise.gauss(shift, sd)) for _ in range(count)]
            metric = Metric("dispatch_us", "us", "lower", True, tuple(times))
            cases.append(CaseRecord(case["name"], None, (metric,), OUTPUTS))
        record = super().record(run, cell)
        return replace(record, cases=tuple(cases), counters=kernel_fields(1.0)["counters"])


class Notes(Progress):
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


@pytest.fixture
def make(make_cell):
    def make(time=60.0, repeats=None, skipped=(), **options):
        cell = make_cell(time=time, blocks=6, isolation=Isolation.in_process, **options)

        def timed(arm):
            (case,) = arm.config["workload"]["cases"]
            cases = [{**case, "name": name} for name in (*COSTS, *skipped)]
            workload = {**arm.config["workload"], "repeats": repeats, "cases": cases}
            return replace(arm, config={**arm.config, "workload": workload})

        return replace(cell, arms=tuple(map(timed, cell.arms)), blocks_from_time=True)

    return make


def run(cell, launcher, progress=None):
    return run_cell(cell, launcher, progress, analysis=AnalysisCache())


def test_a_pilot_gives_blocks_and_rounds_and_a_decided_case_stops(make):
    launcher, notes = Piloted(), Notes()
    run(make(), launcher, notes)
    cell = with_allocation(make())
    look, last = cell.design.looks
    blocks = {case: sorted(counts) for case, counts in launcher.rounds.items()}
    assert cell.design.blocks == last.blocks == len(blocks["noisy"]) > look.blocks
    assert len(blocks["heavy"]) < look.blocks and set(launcher.rounds["heavy"].values()) == {1}
    assert blocks["clear"] == list(range(look.blocks))  # the look decided it
    counts = launcher.rounds["noisy"]
    assert counts[look.blocks] > counts[0] >= 6  # it has the time of the case that stopped
    (first, end) = read_cell(cell.dir)["design"]["looks_taken"]
    assert first["stopped"] == ["clear"] and "stopped" not in end  # all have ended by then
    (decided,) = [line for line in notes.lines if line.startswith("decided")]
    assert decided.startswith("decided: clear: seq_map worse, +2") and " to +" in decided
    assert any("estimates only" in line and "heavy" in line for line in notes.lines)
    assert len(launcher.pilots) == 1 and 1 <= launcher.pilots[0] < 0.2 * 60


def test_a_stopped_case_keeps_the_result_of_its_look(make):
    run(make(), Piloted())
    cell = with_allocation(make())
    rows = {row.case: row for row in AnalysisCache().cell(cell.dir).cell.rows}
    comparison = {case: row.comparison("seq_map") for case, row in rows.items()}
    look, last = cell.design.looks
    assert comparison["clear"].verdict == "worse" and comparison["clear"].blocks == look.blocks
    assert comparison["clear"].level == pytest.approx(1 - look.alpha)
    assert comparison["noisy"].level == pytest.approx(1 - last.alpha)
    assert comparison["noisy"].verdict == "inconclusive"
    assert comparison["noisy"].blocks == last.blocks
    lines = caveats(AnalysisCache().cell(cell.dir))
    (line,) = [line for line in lines if line.startswith("measured in few rounds")]
    assert re.search(r"longer than design\.time: 'heavy' \(\d+ min\)$", line)
    (line,) = [line for line in lines if line.startswith("decided at the look after")]
    assert line.endswith(
        "blocks, with the interval of that look (99 %), and then not measured: 'clear'"
    )


def test_a_case_that_the_pilot_skips_is_in_every_run(make):
    run(make(skipped=["huge"]), Piloted())
    records = read_runs(make().dir)
    assert all([c.skipped for c in r.cases if c.case == "huge"] == ["too large"] for r in records)
    (row,) = [row for row in AnalysisCache().cell(make().dir).cell.rows if row.case == "huge"]
    assert row.skipped == "too large"


def test_the_same_command_continues_without_another_pilot(make):
    class Dies(Piloted):
        def launch(self, runs, cell):
            if runs[0].block == 3:
                raise KeyboardInterrupt
            return super().launch(runs, cell)

    with pytest.raises(KeyboardInterrupt):
        run(make(), Dies())
    kept = (make().dir / cell_allocation.ALLOCATION).read_bytes()
    again = Piloted()
    run(make(), again)
    assert again.pilots == [] and min(again.rounds["noisy"]) == 3
    assert (make().dir / cell_allocation.ALLOCATION).read_bytes() == kept
    assert run(make(), Piloted()).ran == 0


def test_another_time_is_another_study(make):
    run(make(), Piloted())
    with pytest.raises(ConfigError, match=r"design.time was 60.0, now 90.0; set another folder"):
        run(make(time=90.0), Piloted())


def test_a_damaged_allocation_is_refused(make):
    run(make(), Piloted())
    (make().dir / cell_allocation.ALLOCATION).write_text("{")
    with pytest.raises(ConfigError, match=r"allocation\.json: not an allocation"):
        run(make(), Piloted())


def test_a_pilot_that_fails_leaves_the_fewest_rounds(make):
    launcher, notes = Piloted(pilot=False), Notes()
    run(make(), launcher, notes)
    assert set(launcher.rounds["noisy"].items()) == {(block, 1) for block in range(6)}
    assert any("the pilot failed" in line for line in notes.lines)


def test_runs_of_a_fixed_size_are_timed_and_as_many_blocks_follow_as_fit(make):
    class Timed(Piloted):
        def record(self, run, cell):
            return replace(super().record(run, cell), seconds={"process": 1.0})

    launcher, notes = Timed(), Notes()
    run(make(repeats=2), launcher, notes)
    blocks = with_allocation(make(repeats=2)).design.blocks
    assert launcher.pilots == [] and blocks == 20  # of three seconds each
    assert len({record.block for record in read_runs(make().dir)}) in (12, 20)
    assert notes.lines[0] == "a block takes 3 s; 20 blocks"
    slow, notes = Timed(), Notes()
    run(make(repeats=2, time=10.0, folder="slow"), slow, notes)
    assert "6 blocks take about 0:18, longer than design.time=0:10" in notes.lines[0]


def test_a_first_block_that_fails_is_not_followed_by_more_than_a_claim_needs(make):
    class Fails(Piloted):
        def record(self, run, cell):
            return replace(super().record(run, cell), outcome="crashed", detail="planted", cases=())

    run(make(repeats=2), Fails())
    assert with_allocation(make(repeats=2)).design.blocks == 6


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(cell_allocation.time, "monotonic", lambda: now[0])
    return now


def spend(now, plans, slowness):
    """Run blocks that take ``slowness`` times as long; return the seconds, and the plans fitted."""
    timer, began, done = BlockTimer.of(plans), now[0], []
    for plan in plans:
        fitted = timer.fitted(plan)
        seconds = slowness * (fitted.fixed_s + fitted.rounds_s)
        now[0] += seconds
        timer.ended(plan, fitted, seconds)
        done.append(fitted)
    return now[0] - began, done


TEN_S = BlockPlan({"a": 100}, 1.0, {"a": 0.09}, {"a": 0.0})


@pytest.mark.parametrize(
    ("slowness", "least", "most"), [(1.5, 98, 108), (2, 98, 112), (1, 100, 100)]
)
def test_blocks_that_take_longer_than_planned_have_fewer_rounds(now, slowness, least, most):
    seconds, _ = spend(now, [TEN_S] * 10, slowness)
    assert least <= seconds <= most + 1e-9
    late = BlockTimer(0.0, 1.0, 9.0, planned_s=1.0, spent_s=5.0)
    assert late.fitted(TEN_S).rounds == {"a": 1}


def test_dear_first_blocks_and_small_delays_cost_no_rounds(now):
    """The first blocks hold the estimates as well, and few rounds cannot lose a part of one."""
    dear = BlockPlan({"a": 100, "b": 3}, 1.0, {"a": 0.09, "b": 2.0}, {"a": 0.0, "b": 1.0})
    plans = [dear] * 6 + [TEN_S] * 6
    assert spend(now, plans, 1.03)[1] == plans
    assert dear.scaled(0.9).rounds == {"a": 90, "b": 3}


def test_the_time_of_stopped_cases_goes_to_the_others():
    plan = BlockPlan(
        {"a": 10, "b": 10, "c": 10}, 1.0, {"a": 0.1, "b": 0.2, "c": 0.4}, {"a": 1.0, "b": 0, "c": 0}
    )
    left = plan.without({"a"})
    assert left.rounds == {"b": 15, "c": 12}
    assert left.fixed_s + left.rounds_s <= plan.fixed_s + plan.rounds_s
    assert BlockPlan({"a": 3, "b": 4}).without({"a"}).rounds == {"b": 4}


def test_the_time_of_dropped_arms_goes_to_the_rest():
    plan = BlockPlan({"a": 12, "b": 1}, 1.0, {"a": 0.1, "b": 2.0}, {"a": 1.0, "b": 1.0})
    left = plan.for_arms(0.4, 4)
    assert left.rounds == {"a": 28, "b": 2} and left.fixed_s < plan.fixed_s
    assert left.rounds_s <= plan.rounds_s and plan.for_arms(1.0, 10) is plan
    assert BlockPlan({"all": 40}).for_arms(0.4, 4).rounds == {"all": 40}  # a fixed size


def test_an_allocation_is_plain_json(make):
    run(make(), Piloted())
    data = json.loads((make().dir / cell_allocation.ALLOCATION).read_text())
    assert set(data) == {"time_s", "blocks", "looks", "seconds", "cases", "pilot"}
    assert data["pilot"]["cases"][0]["case"] == "clear"
