"""Blocks and rounds that follow from the time of a cell."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from planted_cells import caveats
from planted_runs import OUTPUTS, Notes, PlantedRuns, kernel_fields

from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.config import ConfigError, Isolation
from labkit.experiment.schedule import cell_runner, pilot_and_allocation, rounds_per_block
from labkit.experiment.schedule.case_time_allocation import CasePilot, CellPilot
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.experiment.schedule.pilot_and_allocation import with_allocation
from labkit.records import CaseRecord, Metric, read_cell, read_runs

COSTS = {"clear": (0.02, 0.02), "noisy": (0.02, 0.05), "heavy": (1.5, 0.2)}  # round_s, sd


class Piloted(PlantedRuns):
    """Arm seq_map is slower in the case "clear"; runs have the rounds that their arms name.

    A block moves the clock of the runner on by what the pilot says that it costs.
    """

    clock = SimpleNamespace(now=100.0)

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
            round_s = COSTS[case["name"]][0]
            self.clock.now += (count + 1) * round_s / len(cell.arms)
            noise = random.Random(f"{run.name}/{case['name']}")
            shift = 0.2 if (run.arm, case["name"]) == ("seq_map", "clear") else 0.0
            sd = {"clear": 0.01, "noisy": 0.3, "heavy": 0.3}[case["name"]]
            times = [100 * math.exp(noise.gauss(shift, sd)) for _ in range(count)]
            metric = Metric("dispatch_us", "us", "lower", True, tuple(times))
            cases.append(CaseRecord(case["name"], None, (metric,), OUTPUTS))
        self.clock.now += 0.5 / len(cell.arms)
        record = super().record(run, cell)
        return replace(record, cases=tuple(cases), counters=kernel_fields(1.0)["counters"])


class InBothStates(Piloted):
    """Every case has a row with hot and one with cold caches."""

    def record(self, run, cell):
        record = super().record(run, cell)
        states = ("hot", "cold")
        cases = [
            replace(case, case=f"{case.case} ({state})", notes={**case.notes, "state": state})
            for case in record.cases
            for state in states
        ]
        return replace(record, cases=tuple(cases))


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(Piloted, "clock", SimpleNamespace(now=100.0))
    clock = SimpleNamespace(monotonic=lambda: Piloted.clock.now)
    for module in (pilot_and_allocation, cell_runner, rounds_per_block):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def make(make_cell):
    def make(time=60.0, repeats=None, skipped=(), state="hot", **options):
        cell = make_cell(time=time, blocks=6, isolation=Isolation.in_process, **options)

        def timed(arm):
            (case,) = arm.config["workload"]["cases"]
            cases = [{**case, "name": name} for name in (*COSTS, *skipped)]
            workload = {**arm.config["workload"], "repeats": repeats, "cases": cases}
            workload["state"] = state
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
    assert first["estimates"] == end["estimates"] == ["heavy"]
    assert first["stopped"] == ["clear"] and "stopped" not in end  # all have ended by then
    (decided,) = [line for line in notes.lines if line.startswith("decided")]
    assert decided.startswith("decided: clear: seq_map worse, +2") and " to +" in decided
    assert any("estimates only" in line and "heavy" in line for line in notes.lines)
    assert len(launcher.pilots) == 1 and 1 <= launcher.pilots[0] < 0.2 * 60


def test_a_case_in_both_states_stops_when_both_of_its_rows_are_decided(make):
    launcher = InBothStates()
    run(make(state="both"), launcher)
    cell = with_allocation(make(state="both"))
    look, last = cell.design.looks
    assert sorted(launcher.rounds["clear"]) == list(range(look.blocks))
    assert len(launcher.rounds["noisy"]) == last.blocks  # the look has not ended the cell
    (first, _) = read_cell(cell.dir)["design"]["looks_taken"]
    assert not first["decided"] and first["stopped"] == ["clear (cold)", "clear (hot)"]
    assert first["estimates"] == ["heavy (cold)", "heavy (hot)"]
    counts = launcher.rounds["noisy"]
    assert counts[look.blocks] > counts[0]  # the noise of finished blocks and the time count
    rows = {row.case: row for row in AnalysisCache().cell(cell.dir).cell.rows}
    for state in ("hot", "cold"):
        comparison = rows[f"clear ({state})"].comparison("seq_map")
        assert (comparison.verdict, comparison.blocks) == ("worse", look.blocks)
        heavy = rows[f"heavy ({state})"].comparison("seq_map")
        assert heavy.reason == "deciding it would take longer than design.time"


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
    heavy = comparison["heavy"]  # of an estimate nothing is claimed
    assert heavy.verdict == "estimate_only" and "longer than design.time" in heavy.reason
    assert heavy.p_adjusted is None and heavy.ci_low_pct < heavy.effect_pct < heavy.ci_high_pct
    lines = caveats(AnalysisCache().cell(cell.dir))
    (line,) = [line for line in lines if line.startswith("measured in few rounds")]
    assert re.search(r"longer than design\.time: 'heavy' \(\d+ min\)$", line)
    (line,) = [line for line in lines if line.startswith("decided at the look after")]
    assert line.endswith(
        "blocks, with the interval of that look (99 %), and then not measured: 'clear'"
    )


def test_a_block_that_is_repeated_measures_what_looks_have_decided_since(make):
    run(make(), Piloted())
    before = AnalysisCache().cell(make().dir).cell
    for path in make().paths.runs.glob("b02-*.json"):
        path.unlink()
    launcher = Piloted()
    run(make(), launcher)
    assert {case: set(counts) for case, counts in launcher.rounds.items()} == {
        case: {2} for case in COSTS
    }
    for old, new in zip(before.rows, AnalysisCache().cell(make().dir).cell.rows, strict=True):
        now, then = new.comparison("seq_map"), old.comparison("seq_map")
        assert (now.verdict, now.blocks) == (then.verdict, then.blocks)


def test_a_study_that_was_suspended_measures_every_block(make):
    class Suspended(Piloted):
        def launch(self, runs, cell):
            self.clock.now += 100.0 * (runs[0].block == 2)
            return super().launch(runs, cell)

    launcher = Suspended()
    run(make(), launcher)
    blocks = {block for counts in launcher.rounds.values() for block in counts}
    assert blocks == set(range(with_allocation(make()).design.blocks))


def test_ctrl_z_takes_no_time_from_a_cell(make):
    class Suspended(Piloted):
        """The pilot and the third block are suspended, which their launches say."""

        def pilot(self, cell, seconds):
            self.clock.now += 1000.0
            return {**super().pilot(cell, seconds), "suspended_s": 1000.0}

        def launch(self, runs, cell):
            records = super().launch(runs, cell)
            if runs[0].block != 2:
                return records
            self.clock.now += 1000.0
            seconds = {"suspended": 1000.0 / len(runs)}
            return [replace(record, seconds=seconds) for record in records]

    plain, suspended = Piloted(), Suspended()
    run(make(folder="plain"), plain)
    run(make(folder="suspended"), suspended)
    assert suspended.rounds == plain.rounds


def test_a_sweep_does_not_test_what_is_out_of_reach(make):
    cell = make()
    arms = tuple(replace(arm, overrides={"n": arm.name}) for arm in cell.arms)
    cell = replace(cell, arms=arms, sweep={"n": ["base", "seq_map"]})
    run(cell, Piloted())
    best = {one.case: one for one in AnalysisCache().cell(cell.dir).best}
    assert {case for case, one in best.items() if one.withheld} == {"heavy"}
    assert "longer than design.time" in best["heavy"].withheld
    *_, last = with_allocation(cell).design.looks
    assert best["clear"].level == pytest.approx(1 - last.alpha / 2)  # two rows are tested


def test_a_case_that_the_pilot_skips_is_in_every_run(make):
    run(make(skipped=["huge"]), Piloted())
    records = read_runs(make().dir)
    assert all([c.skipped for c in r.cases if c.case == "huge"] == ["too large"] for r in records)
    (row,) = [row for row in AnalysisCache().cell(make().dir).cell.rows if row.case == "huge"]
    assert row.skipped == "too large"


def test_the_same_command_continues_without_another_pilot(make):
    dies = Piloted()
    dies.dies_in = 3
    with pytest.raises(KeyboardInterrupt):
        run(make(), dies)
    kept = (make().dir / pilot_and_allocation.ALLOCATION).read_bytes()
    again = Piloted()
    run(make(), again)
    assert again.pilots == [] and min(again.rounds["noisy"]) == 3
    assert (make().dir / pilot_and_allocation.ALLOCATION).read_bytes() == kept
    assert run(make(), Piloted()).ran == 0


def test_a_continued_study_has_the_estimates_of_the_interrupted_one(make):
    dies = Piloted()
    dies.dies_in = 9  # after the case out of reach has ended
    with pytest.raises(KeyboardInterrupt):
        run(make(), dies)
    run(make(), Piloted())
    assert read_cell(make().dir)["design"]["estimates"].keys() == {"heavy"}
    analysis = AnalysisCache().cell(make().dir)
    (row,) = [row for row in analysis.cell.rows if row.case == "heavy"]
    assert row.comparison("seq_map").verdict == "estimate_only"
    (tested,) = cell_summary(analysis).tested
    assert "heavy" not in dict(tested.names)  # nor is it in the study's family


def test_typed_blocks_have_no_look_when_the_same_command_omits_them(make):
    cell = replace(make(), blocks_from_time=False)
    typed = replace(cell, design=replace(cell.design, blocks=12))
    run(typed, Piloted())
    assert read_cell(typed.dir)["design"]["looks"] == []
    later = with_allocation(make())
    refuse_changes(later)
    assert (later.design.blocks, later.design.looks) == (12, [])


def test_another_time_is_another_study(make):
    run(make(), Piloted())
    with pytest.raises(ConfigError, match=r"design.time was 60.0, now 90.0; set another folder"):
        run(make(time=90.0), Piloted())


def test_a_damaged_allocation_is_refused(make):
    run(make(), Piloted())
    (make().dir / pilot_and_allocation.ALLOCATION).write_text("{")
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

    notes = Notes()
    run(make(repeats=2), Fails(), notes)
    assert with_allocation(make(repeats=2)).design.blocks == 6
    line = "a run of the first block failed, so the cell gets the fewest blocks, 6"
    assert notes.lines[0] == line


def test_blocks_whose_arm_runs_out_of_memory_as_it_claims_follow_from_the_time(make):
    class Dies(Piloted):
        def record(self, run, cell):
            record = replace(super().record(run, cell), seconds={"process": 1.0})
            if run.arm != "seq_map":
                return record
            return replace(record, outcome="oom", detail="killed", cases=())

    def claimed(folder, name):
        cell = make(repeats=2, folder=folder)
        arms = (replace(arm, out_of_memory=arm.name == name) for arm in cell.arms)
        return replace(cell, arms=tuple(arms))

    for folder, name, blocks in (("claimed", "seq_map", 20), ("other", "control", 6)):
        run(claimed(folder, name), Dies())
        assert with_allocation(claimed(folder, name)).design.blocks == blocks


def test_an_allocation_is_plain_json(make):
    run(make(), Piloted())
    data = json.loads((make().dir / pilot_and_allocation.ALLOCATION).read_text())
    assert set(data) == {"time_s", "blocks", "looks", "seconds", "cases", "pilot"}
    assert data["pilot"]["cases"][0]["case"] == "clear"
