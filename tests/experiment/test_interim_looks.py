"""Interim looks: a sequential study ends only at a predeclared look at which all is decided."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planted_runs import Notes, PlantedRuns, kernel_fields

from labkit import analysis, config
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.config import ConfigError, PlannedLook
from labkit.experiment import StudyError
from labkit.experiment.schedule import cell_runner
from labkit.experiment.schedule.cell_runner import unfinished
from labkit.machine.facts import machine_snapshot
from labkit.records import (
    Metric,
    Record,
    read_cell,
    read_runs,
    write_json,
)

LOOKS = [PlannedLook(8, 0.02), PlannedLook(10, 0.01), PlannedLook(12, 0.02)]


class Planted(PlantedRuns):
    """Arm seq_map is slower by ``effect`` (log scale)."""

    def __init__(self, effect: float, noise: float, outcome: str = "ok") -> None:
        super().__init__()
        self.effect, self.noise, self.outcome = effect, noise, outcome

    def fields(self, run, cell):
        log = random.Random(run.name).gauss(0, self.noise)
        log += self.effect if run.arm == "seq_map" else 0.0
        detail = None if self.outcome == "ok" else "planted"
        return kernel_fields(100 * math.exp(log)) | {"outcome": self.outcome, "detail": detail}


class OnThisHost(Planted):
    def fields(self, run, cell):
        return super().fields(run, cell) | {"environment": {"host": machine_snapshot.host_hash()}}


def run_cell(cell, *others, analysis=None, **more):
    return cell_runner.run_cell(cell, *others, analysis=analysis or AnalysisCache(), **more)


@pytest.fixture
def make(make_cell):
    def cell(blocks=12, **design):
        return make_cell(blocks=blocks, **{"looks": LOOKS, "runs_per_block": 1, **design})

    return cell


def design_of(cell):
    return read_cell(cell.dir)["design"]


def test_a_clear_effect_ends_the_study_at_the_first_look(make):
    cell = make()
    outcome = run_cell(cell, Planted(0.1, 0.002))
    assert outcome.ran == len(read_runs(cell.dir)) == 8 * 3
    analysis.write_cell(cell.dir)
    kept = design_of(cell)
    assert kept["blocks"] == 8
    assert kept["looks_taken"] == [{"blocks": 8, "alpha": 0.02, "decided": True}]
    assert kept["looks"] == [config.to_plain(look) for look in LOOKS]
    data = analysis.analyse_cell(cell.dir)
    assert "worse" in {c["verdict"] for c in data["rows"][0]["comparisons"]}


def test_a_stopped_study_stays_stopped(make):
    run_cell(make(), Planted(0.1, 0.002))
    again = Planted(0.1, 0.002)
    assert unfinished(make()) == []
    assert run_cell(make(), again).ran == 0
    assert again.launched == []


def test_a_study_that_a_look_has_ended_is_finished_on_every_host(make, monkeypatch):
    run_cell(make(), OnThisHost(0.1, 0.002))
    monkeypatch.setattr(machine_snapshot, "host_hash", lambda: "elsewhere")
    for redo in (False, True):
        assert run_cell(make(), OnThisHost(0.1, 0.002), redo_failed=redo).ran == 0
    next(make().paths.runs.glob("b03-*.json")).unlink()
    with pytest.raises(StudyError, match="but this is host elsewhere"):
        run_cell(make(), OnThisHost(0.1, 0.002))


def test_a_study_grown_past_its_last_look_is_not_finished(make, monkeypatch):
    cell, grown = (make(looks=LOOKS[:2], blocks=blocks) for blocks in (12, 16))
    last = SimpleNamespace(undecided_cases=lambda _: ["a"] * (len(read_runs(cell.dir)) < 12 * 3))
    run_cell(cell, OnThisHost(0.1, 0.002), analysis=last)
    analysis.write_cell(cell.dir)
    assert [look["decided"] for look in design_of(cell)["looks_taken"]] == [False, False, True]
    assert (len(unfinished(cell)), len(unfinished(grown))) == (0, 4 * 3)
    before = (cell.dir / "cell.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(machine_snapshot, "host_hash", lambda: "elsewhere")
        with pytest.raises(StudyError, match="but this is host elsewhere"):
            run_cell(grown, OnThisHost(0.1, 0.002))
    assert (cell.dir / "cell.json").read_bytes() == before
    assert run_cell(grown, OnThisHost(0.1, 0.002)).ran == 4 * 3


def test_a_host_that_may_not_continue_a_study_declares_no_blocks(make, monkeypatch):
    """As when another version of labkit leaves open what was decided at the look."""
    run_cell(make(), OnThisHost(0.1, 0.002))
    monkeypatch.setattr(machine_snapshot, "host_hash", lambda: "elsewhere")
    undecided = SimpleNamespace(undecided_cases=lambda _: ["a"])
    with pytest.raises(StudyError, match="but this is host elsewhere"):
        run_cell(make(), OnThisHost(0.1, 0.002), analysis=undecided)
    assert design_of(make())["blocks"] == 8


def test_noise_continues_to_the_last_look(make):
    cell = make()
    run_cell(cell, Planted(0.0, 0.1))
    assert len(read_runs(cell.dir)) == 12 * 3
    taken = design_of(cell)["looks_taken"]
    assert [(t["blocks"], t["decided"]) for t in taken] == [(b, False) for b in (8, 10, 12)]
    assert design_of(cell)["blocks"] == 12


def test_without_looks_a_clear_effect_ends_nothing_early(make):
    cell = make(looks=[])
    assert run_cell(cell, Planted(0.1, 0.002)).ran == 12 * 3
    assert "looks_taken" not in design_of(cell)


class TwoRows(Planted):
    """The same with a second case in which the arm differs by nothing that can be detected."""

    def record(self, run, cell) -> Record:
        record = super().record(run, cell)
        log = random.Random(f"two/{run.name}").gauss(0, 0.1)
        metric = Metric("dispatch_us", "us", "lower", True, (100 * math.exp(log),))
        (one,) = record.cases
        return replace(record, cases=(one, replace(one, case="two", metrics=(metric,))))


def test_one_decided_row_does_not_end_the_study(make):
    """All must be: a study that any row ends leaves the others undecided on few blocks."""
    cell = make(margin_pct=0.5)
    assert run_cell(cell, TwoRows(0.2, 0.002)).ran == 12 * 3
    assert not any(taken["decided"] for taken in design_of(cell)["looks_taken"])
    assert words(cell) == ["worse", "inconclusive"]


def test_failed_runs_decide_nothing(make):
    assert run_cell(make(), Planted(0.1, 0.002, "crashed")).ran == 12 * 3


def test_a_design_with_looks_needs_a_function_that_takes_them(make):
    with pytest.raises(ValueError, match="its design has looks, but analysis is None"):
        cell_runner.run_cell(make(), Planted(0.0, 0.1))


def test_a_look_is_taken_only_on_its_own_blocks(make):
    """Killed in block 9: the look after 8 is past, the next one is after 10."""
    looked = []

    def decided(cell_dir):
        looked.append(len(read_runs(cell_dir)) // 3)
        return ["row"]

    dies = Planted(0.0, 0.1)
    dies.dies_in = 9
    with pytest.raises(KeyboardInterrupt):
        run_cell(make(), dies, analysis=SimpleNamespace(undecided_cases=decided))
    assert (looked, design_of(make())["blocks"]) == ([8], 10)
    assert len(unfinished(make())) == 3 * 3
    run_cell(make(), Planted(0.0, 0.1), analysis=SimpleNamespace(undecided_cases=decided))
    assert looked == [8, 10, 12]
    assert [t["blocks"] for t in design_of(make())["looks_taken"]] == [8, 10, 12]


def test_other_looks_are_refused_in_the_same_folder(make):
    run_cell(make(blocks=8), Planted(0.0, 0.1))
    assert run_cell(make(blocks=10), Planted(0.0, 0.1)).ran == 2 * 3
    with pytest.raises(ConfigError, match=r"design\.looks was"):
        run_cell(make(looks=[*LOOKS[:2], PlannedLook(12, 0.01)]), Planted(0.0, 0.1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"looks": [PlannedLook(8, 0.03), PlannedLook(12, 0.03)]}, r"at most design\.alpha=0\.05"),
        ({"looks": [PlannedLook(8, 0.05)]}, "and the last block must spend some alpha"),
        (
            {"looks": [PlannedLook(8, 0.03), PlannedLook(12, 0.0)]},
            "every look and the last block must spend some alpha",
        ),
        ({"looks": [PlannedLook(12, 0.01), PlannedLook(8, 0.01)]}, "increase from look to look"),
        ({"looks": [PlannedLook(8, 0.02), PlannedLook(8, 0.02)]}, "increase from look to look"),
        (
            {"looks": [PlannedLook(4, 0.01), PlannedLook(12, 0.04)]},
            "4 blocks of 1 cannot reach p = 0.01",
        ),
    ],
)
def test_impossible_looks_are_refused(make, change, message):
    with pytest.raises(ConfigError, match=message):
        make(**change)


@pytest.mark.parametrize(
    ("blocks", "looks"),
    [
        (6, []),  # before the first look: looked at once
        (8, [(8, 0.02), (12, 0.02)]),  # at a look: as declared
        (12, [(8, 0.02), (12, 0.02)]),
        (10, [(8, 0.02), (10, 0.03)]),  # the last block spends what is left
        (20, [(8, 0.02), (12, 0.02), (20, 0.01)]),
    ],
)
def test_the_last_look_spends_the_alpha_that_earlier_looks_leave(blocks, looks):
    declared = [PlannedLook(8, 0.02), PlannedLook(12, 0.02)]
    design = config.Design(blocks=blocks, looks=declared)
    assert [(look.blocks, look.alpha) for look in design.all_looks] == looks


def test_more_blocks_move_only_the_last_look(make):
    early = [PlannedLook(8, 0.02)]
    run_cell(make(looks=early, blocks=10), Planted(0.0, 0.1))
    assert run_cell(make(looks=early, blocks=12), Planted(0.0, 0.1)).ran == 2 * 3
    for looks in ([PlannedLook(8, 0.01)], [PlannedLook(9, 0.02)], []):
        with pytest.raises(ConfigError, match=r"design\.looks was"):
            run_cell(make(looks=looks, blocks=13), Planted(0.0, 0.1))


def test_a_block_is_one_thing_in_every_isolation(make):
    """And has one run of each arm where arms take turns, because a process is one sample."""
    cell = make()

    looks = [PlannedLook(8, 0.02)]
    ends = [(8, 0.02), (12, 0.03)]
    for isolation in (i for i in config.Isolation if i is not config.Isolation.auto):
        design = config.Design(blocks=12, isolation=isolation, looks=looks)
        run = replace(cell, design=design).design
        assert (run.blocks, run.runs_per_block) == (12, 1)
        assert [(look.blocks, look.alpha) for look in run.looks] == ends
        assert replace(cell, design=run).design == run
        pairs = config.Design(blocks=6, runs_per_block=2, isolation=isolation)
        if isolation is config.Isolation.process:
            assert replace(cell, design=pairs).design == pairs
        else:
            with pytest.raises(ConfigError, match=r"runs_per_block=1 and design\.blocks=12"):
                replace(cell, design=pairs)


def test_blocks_added_after_results_were_shown_are_exploratory(make):
    """In the file, so that a report rebuilt later says the same."""
    first = make(blocks=8, looks=[])
    run_cell(first, Planted(0.2, 0.002))
    assert first.dir and analysis.write_cell(first.dir)["design"]["shown"] == [8]
    assert words(first) == ["worse"]
    more, progress = make(blocks=10, looks=[]), Notes()
    assert run_cell(more, Planted(0.2, 0.002), progress).ran == 2 * 3
    assert any("design.looks at 8 and 10 blocks" in note for note in progress.lines)
    for _ in range(2):
        data = analysis.write_cell(more.dir)
        assert data["design"]["shown"] == [8, 10] and words(more) == ["estimate_only"]
        (comparison, _) = data["rows"][0]["comparisons"]
        assert comparison["reason"].endswith("after results were shown (8 -> 10)")
        assert comparison["p_adjusted"] is None and comparison["ci_low_pct"] is None
        assert comparison["effect_pct"] == pytest.approx(22, abs=1)
    assert progress.lines and run_cell(make(blocks=10, looks=[]), Planted(0.2, 0.002)).ran == 0


def test_an_old_study_without_the_note_is_exploratory_too(make):
    cell = make(blocks=8, looks=[])
    run_cell(cell, Planted(0.2, 0.002))
    data = analysis.write_cell(cell.dir)
    del data["design"]["shown"]
    write_json(cell.dir / "cell.json", data)
    run_cell(make(blocks=10, looks=[]), Planted(0.2, 0.002))
    assert words(cell) == ["estimate_only"]


def test_an_interrupted_study_was_not_shown_and_continues(make):
    cell, dies = make(blocks=8, looks=[]), Planted(0.2, 0.002)
    dies.dies_in = 7
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, dies)
    assert analysis.write_cell(cell.dir)["design"]["shown"] == []  # whoever rebuilds a report
    assert words(cell) == ["estimate_only"]
    run_cell(make(blocks=8, looks=[]), Planted(0.2, 0.002))
    assert words(cell) == ["worse"]


def test_a_study_may_grow_from_look_to_look(make):
    run_cell(make(blocks=8), Planted(0.005, 0.01))
    analysis.write_cell(make().dir)
    progress = Notes()
    run_cell(make(blocks=12), Planted(0.005, 0.01), progress)
    data = analysis.write_cell(make().dir)
    assert data["design"]["shown"] == [8, 12]
    assert words(make()) != ["estimate_only"]
    assert not any("exploratory" in note for note in progress.lines)


def words(cell):
    """The verdict on the arm in every row."""
    rows = analysis.analyse_cell(cell.dir)["rows"]
    return [c["verdict"] for row in rows for c in row["comparisons"] if c["arm"] == "seq_map"]
