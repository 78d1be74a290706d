"""Requests and blocks that follow from the time of a cell, with a clock that the launcher moves."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import caveats
from planted_runs import Notes, PlantedRuns

from labkit import config
from labkit.analysis.comparison.perplexity_and_kl import text_qualities
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.config import Isolation
from labkit.experiment.cell import ReadyCell
from labkit.experiment.compose.resumed_legacy_cell import rounds_as_begun
from labkit.experiment.schedule import pilot_and_allocation, plan_preview
from labkit.experiment.schedule.case_time_allocation import CellPilot
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.schedule.cell_time_limit import TimeLimit
from labkit.experiment.schedule.pilot_and_allocation import allocation_of, lines_of, with_allocation
from labkit.experiment.schedule.requests_per_run import PILOT_BLOCK, UnitLimits, pilot_of
from labkit.records import Arm, CaseRecord, Metric, read_arm, read_cell, read_runs
from labkit.workload.scoring import ScoringKind
from labkit.workload.workload_protocols import CasePilot


class Served(PlantedRuns):
    """Arms that serve requests at ``request_s`` seconds each, and start in ``start_s`` seconds.

    ``slowness``: how many times as long a block takes. The arm serves every other request slower
    by ``effect``, which sizes must not depend on.
    """

    def __init__(self, now, start_s=1.0, request_s=0.05, slowness=lambda block: 1.0, effect=0.0):
        super().__init__()
        self.now, self.start_s, self.request_s = now, start_s, request_s
        self.slowness, self.effect, self.served = slowness, effect, {}

    def fields(self, run, cell):
        workload = cell.arm(run.arm).config["workload"]
        count = workload["num_requests"] or 64
        self.served.setdefault(run.block, set()).add(count)
        slow, noise = self.slowness(run.block), random.Random(run.name)
        measure = slow * count * self.request_s
        self.now[0] += slow * self.start_s + measure
        shift = self.effect if run.arm == "new" else 0.0
        each = [
            {"id": f"r{i}", "e2e_ms": 100 * math.exp(noise.gauss(shift * (i % 2), 0.01))}
            for i in range(count)
        ]
        rate = 1000 * math.exp(noise.gauss(-shift, 0.1))  # not decided at a look
        metric = Metric("total_tok_s", "tok/s", "higher", True, (rate,))
        case = CaseRecord("all", None, (metric,), notes={"requests": each})
        seconds = {"process": slow * self.start_s + measure, "measure": measure}
        return {"cases": (case,), "seconds": seconds, "counters": {"engine.paged": 1.0}}


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which a launcher moves."""
    now = [100.0]
    monkeypatch.setattr(pilot_and_allocation.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def make(tmp_path, make_cell):
    def make(
        time=120.0, num_requests=0, blocks=0, folder="cell", isolation="in_process", **workload
    ):
        make_cell()  # the lock of a host that is timing is the test's own
        chat = config.Workload(num_requests=num_requests, **workload)
        parts = {"engine": config.Engine(), "model": config.Model(shape=config.ModelShape())}
        plain = {key: config.to_plain(value) for key, value in (parts | {"workload": chat}).items()}
        arms = [("base", "baseline"), ("new", "arm"), ("control", "control")]
        made = tuple(Arm(name, role, {"n": name}, {**plain, "seed": 7}) for name, role in arms)
        design = config.Design(time=time, blocks=blocks or 6, isolation=Isolation(isolation))
        of_time = {"blocks_from_time": not blocks, "units_from_time": True}
        return ReadyCell(tmp_path / folder, folder, made, design, 7, **of_time)

    return make


def run(cell, launcher, progress=None):
    return run_cell(cell, launcher, progress, analysis=AnalysisCache())


@pytest.mark.parametrize("isolation", ["in_process", "live", "process"])
def test_a_pilot_block_gives_the_requests_of_a_run(make, now, isolation):
    cell, began, launcher, notes = make(isolation=isolation), now[0], Served(now), Notes()
    run(cell, launcher, notes)
    counts = {block: next(iter(served)) for block, served in launcher.served.items()}
    assert counts.pop(PILOT_BLOCK) == 16 and len(set(counts.values())) == 1
    (served,), ready = set(counts.values()), with_allocation(cell)
    assert 32 <= served < 64 and ready.design.blocks >= 9  # 64 requests: 126 s in 10 blocks
    assert now[0] - began <= 120
    assert all(record.block != PILOT_BLOCK for record in read_runs(cell.dir))
    assert notes.lines[0].startswith("pilot: ")
    said = f"every run has the first {served} requests or windows, a number that a pilot found"
    assert said in list(caveats(AnalysisCache().cell(cell.dir)))
    (line,) = [line for line in notes.lines if "per run" in line]
    assert f"{served} of 64 requests per run, about 1:" in line and ("decided with" in line) == (
        isolation != "process"
    )
    data = json.loads((cell.dir / "allocation.json").read_text())
    assert data["cases"][0]["rounds"] == served and data["pilot"]["start_s"] == pytest.approx(3.0)
    again = Served(now)
    assert run(cell, again).ran == 0 and not again.served


class Read(Served):
    """Arms whose files say how many requests there are; ``None`` are all."""

    def __init__(self, now):
        super().__init__(now)
        self.prepared, self.run = set(), set()

    def count(self, cell):
        arm = read_arm(cell.paths.arm("new"))
        assert arm.config == cell.arm("new").config
        return arm.config["workload"]["num_requests"]

    def prepare(self, cell):
        self.prepared.add(self.count(cell))

    def fields(self, run, cell):
        self.run.add(self.count(cell))
        return super().fields(run, cell)


@pytest.mark.parametrize("time", [120.0, None])
def test_workers_of_versions_in_which_0_is_no_number_prepare_and_serve_all(make, now, time):
    launcher = Read(now)
    run(make(time, blocks=0 if time else 6), launcher)
    assert launcher.prepared == {None}
    assert 0 not in launcher.run and (None in launcher.run) == (time is None)


def test_sizes_follow_from_costs_and_noise_and_never_from_an_effect(make, now):
    for effect in (0.0, 0.5):
        run(make(folder=f"e{effect}"), Served(now, effect=effect))
    first, second = (
        json.loads((make(folder=f).dir / "allocation.json").read_text()) for f in ("e0.0", "e0.5")
    )
    assert first["blocks"] == second["blocks"] and first["cases"] == second["cases"]


def test_all_requests_are_served_if_enough_blocks_of_them_fit(make, now):
    launcher = Served(now, request_s=0.02)
    run(make(), launcher)
    assert set.union(*(n for block, n in launcher.served.items() if block < 999)) == {64}
    assert with_allocation(make()).design.blocks == 16


def test_a_fixed_number_of_blocks_or_requests_stays(make, now):
    launcher = Served(now)
    run(make(blocks=4, time=20.0), launcher)
    assert set(launcher.served) == {0, 1, 2, 3, PILOT_BLOCK} and launcher.served[0] == {32}
    fixed = Served(now)
    run(make(num_requests=40, folder="fixed"), fixed)
    assert set.union(*fixed.served.values()) == {40} and PILOT_BLOCK not in fixed.served
    whole = Served(now)
    run(make(time=None, blocks=4, folder="whole"), whole)
    assert set.union(*whole.served.values()) == {64} and PILOT_BLOCK not in whole.served


def test_a_study_that_began_with_all_requests_goes_on(make, now):
    run(make(num_requests=None, blocks=2), Served(now))
    arms = rounds_as_begun(make(blocks=3).arms, make().dir)
    assert {arm.config["workload"]["num_requests"] for arm in arms} == {None}
    assert run(replace(make(blocks=3), arms=arms), Served(now)).ran == 3


@pytest.mark.parametrize("num_requests", [0, 40])
@pytest.mark.parametrize(("slow", "later"), [(1.0, 0), (1.5, 0), (2.0, 0), (2.0, 3), (2.0, 8)])
def test_a_study_never_takes_more_than_said_and_a_fifth(make, now, num_requests, slow, later):
    """Blocks that turn out slower are fewer, and the last look has the alpha that is left."""
    cell, began = make(num_requests=num_requests), now[0]
    slowness = lambda block: slow if later < block < PILOT_BLOCK else 1.0  # noqa: E731
    notes = Notes()
    run(cell, Served(now, slowness=slowness), notes)
    assert now[0] - began <= 1.2 * 120
    planned, done = with_allocation(cell), AnalysisCache().cell(cell.dir)
    design = read_cell(cell.dir)["design"]
    assert done.data.complete and done.data.design.blocks == len(done.data.blocks_done)
    assert done.data.criteria.alpha > 0 and planned.design.blocks >= design["blocks"] >= 6
    spent = [look["alpha"] for look in design["looks"]] or [0.05]
    assert sum(spent) == pytest.approx(0.05)
    looked = {look["blocks"] for look in design.get("looks_taken", ())}
    assert looked <= {look["blocks"] for look in design["looks"]}
    assert len(looked) == 2 or later < 8
    if slow == 2.0:
        assert any("blocks take longer than planned" in line for line in notes.lines)
    assert run(cell, Served(now)).ran == 0  # and the same command finds it finished


@pytest.mark.parametrize(("block", "must_fit"), [(6, 1), (7, 2), (8, 0), (9, 1)])
def test_a_cell_ends_before_a_block_after_which_it_could_no_longer_end_in_time(
    make, block, must_fit
):
    design = replace(make().design, blocks=10)
    cell = replace(make(), design=replace(design, looks=[config.PlannedLook(8, 0.01)]))
    ended = [10.0 * i for i in range(block + 1)]  # a block takes 10 s
    for left_s in (10.0 * must_fit - 1, 10.0 * must_fit):
        limit = TimeLimit(cell, ended[-1] + left_s, ended, finished=0)
        assert limit.ends_before(block) == (0 < left_s < 10 * must_fit), left_s


@pytest.mark.parametrize(("num_requests", "block"), [(0, PILOT_BLOCK), (0, 1), (40, 1)])
def test_ctrl_z_takes_no_time_from_a_cell(make, now, num_requests, block):
    class Suspended(Served):
        def launch(self, runs, cell):
            records = super().launch(runs, cell)
            if runs[0].block != block:
                return records
            now[0] += 1000.0
            lost = {"suspended": 1000.0 / len(runs)}
            return [replace(record, seconds={**record.seconds, **lost}) for record in records]

    plain, suspended = Served(now), Suspended(now)
    run(make(num_requests=num_requests, folder="plain"), plain)
    run(make(num_requests=num_requests, folder="suspended"), suspended)
    assert suspended.served == plain.served


def test_a_study_does_not_end_before_blocks_that_are_finished(make, now):
    """Its last look would be missing, and it would claim nothing, whatever followed."""
    cell = make(num_requests=40)
    run(cell, Served(now))
    design = with_allocation(cell).design
    repeated = (design.blocks - 5, design.blocks - 2)
    assert design.blocks - 2 not in [look.blocks for look in design.looks]
    for block in repeated:
        next(cell.paths.runs.glob(f"b{block:02d}-*.json")).unlink()
    assert run(cell, Served(now, slowness=lambda block: 1.5)).ran == 2 * 3
    done = AnalysisCache().cell(cell.dir).data
    assert with_allocation(cell).design.blocks == done.design.blocks == design.blocks
    assert done.withheld_reason is None


def test_what_does_not_fit_is_said_beforehand(make, now):
    notes = Notes()
    run(make(time=20.0), Served(now), notes)
    (line,) = [line for line in notes.lines if "longer than design.time" in line]
    assert "with fewer blocks or requests nothing could be claimed" in line


def test_what_a_stopped_pilot_left_is_moved_aside(make, now):
    """A worker would not overwrite it, and it is no result of this pilot."""
    cell = make()
    left = cell.paths.pending / f"b{PILOT_BLOCK}-p00-base.json"
    left.parent.mkdir(parents=True)
    left.write_text("{")
    run(cell, Served(now))  # whose launches find nothing pending
    assert (cell.paths.abandoned / left.name).read_text() == "{"


def test_a_pilot_that_fails_leaves_the_fewest_requests(make, now):
    class Fails(Served):
        def record(self, run, cell):
            record = super().record(run, cell)
            failed = {"outcome": "crashed", "detail": "planted", "cases": ()}
            return replace(record, **failed) if run.block == PILOT_BLOCK else record

    launcher, notes = Fails(now), Notes()
    run(make(), launcher, notes)
    assert launcher.served[0] == {32} and len(launcher.served) == 7
    assert any("the pilot failed" in line for line in notes.lines)


def test_the_plan_has_the_time_of_an_earlier_pilot(make):
    pilot = CellPilot(3.0, (CasePilot("all", 0.15, 0.0, 0.1, 16),))
    allocation = allocation_of(make(), pilot, 120.0)
    (line,) = lines_of(make(), allocation, 120.0)
    assert allocation.seconds <= 120 and "of 64 requests per run" in line


@pytest.mark.parametrize(
    "options", [{"per_request": True}, {"arrivals": config.Arrivals(config.ArrivalKind.at_once)}]
)
def test_rows_of_single_requests_and_bursts_have_all(make, options):
    assert make().rounds_from_time and not make(**options).rounds_from_time


def test_limits_of_a_run(make):
    limits = UnitLimits.of(make())
    assert (limits.together, limits.least, limits.total, limits.in_pilot) == (16, 32, 64, 16)
    assert limits.noun == "request"


class Scored(Served):
    """Arms whose windows have a KL divergence of ``kl`` on average; the baseline's is 0."""

    def __init__(self, now, kl):
        super().__init__(now)
        self.kl = kl

    def fields(self, run, cell):
        count = cell.arm(run.arm).config["workload"]["num_windows"]
        self.served.setdefault(run.block, set()).add(count)
        rng = np.random.default_rng(5)  # the same in every run
        kl = (self.kl if run.arm == "new" else 0.0) * rng.lognormal(-0.125, 0.5, 64)[:count]
        windows = [
            {"tokens": 9, "nll": 9.0, "same_top1": 9, "probability_change_squared": 0.0}
            | {"kl": [float(one)] * 9, "kl_sum": 9 * float(one)}
            for one in kl
        ]
        note = {"reference_top": 9, "reference_rest": 0.0, "windows": windows, "worst": []}
        rates = tuple(100 + 10 * rng.random(count // 4))
        metric = Metric("total_tok_s", "tok/s", "higher", True, rates)
        seconds = {"process": 1.0 + 0.05 * count, "measure": 0.05 * count}
        self.now[0] += seconds["process"]
        case = CaseRecord("all", None, (metric,), notes={"scoring": note})
        return {"cases": (case,), "seconds": seconds, "counters": {"engine.paged": 1.0}}


@pytest.mark.parametrize(
    ("kl", "windows", "status"), [(0.002, 16, "pass"), (0.0067, 32, "pass"), (0.05, 16, "fail")]
)
def test_windows_are_scored_until_a_declared_look_decides_the_limits(
    make, now, monkeypatch, kl, windows, status
):
    monkeypatch.setattr(ScoringKind, "units", lambda self, experiment: 64)
    cell = make(kind="scoring", num_windows=0, num_requests=None, concurrency=4, time=60.0)
    arms = [replace(a, identity="quality", quality={"kl_mean": 0.01}) for a in cell.arms]
    launcher, notes = Scored(now, kl), Notes()
    cell = replace(cell, arms=tuple(arms))
    run(cell, launcher, notes)
    assert max(launcher.served.pop(PILOT_BLOCK)) == windows
    assert set.union(*launcher.served.values()) == {windows}
    assert f"the limits on quality are decided after {windows} windows" in notes.lines
    analysis = AnalysisCache().cell(cell.dir)
    assert analysis.gates["identical"].status == status
    assert analysis.data.design.quality_confidence == pytest.approx(1 - 0.05 / 3)
    (one,) = [q for q in analysis.cell.quality if q.arm == "new"]
    assert one.windows == windows
    history = SimpleNamespace(studies=lambda *_: iter([(cell.dir, read_cell(cell.dir))]))
    planned, timing = plan_preview._timing(cell, None, history)
    assert f"{planned.design.blocks} blocks with {windows} of 64 windows per run" in timing.lines[0]
    wider = text_qualities(["base", "new"], analysis.data.records)[1].metrics["kl_mean"]
    assert one.metrics["kl_mean"].low < wider.low < wider.high < one.metrics["kl_mean"].high


def test_windows_vary_as_much_more_as_are_scored_together():
    """A round has one rate, the mean over its windows; it was taken for that of each window."""
    rates = {"base": (1.0, 1.0, 1.0, 1.0), "control": (1.1, 0.9, 1.2, 1.0)}
    roles = {"base": "baseline", "control": "control"}

    def sd(count, together, case_of):
        records = [
            SimpleNamespace(ok=True, arm=arm, role=roles[arm], cases=[case_of(values)],
                            seconds={"process": 2.0}, start_up_s=1.0)
            for arm, values in rates.items()
        ]  # fmt: skip
        return pilot_of(records, count, together).cases[0].sd

    def scored(values):
        return CaseRecord("all", None, (Metric("total_tok_s", "tok/s", "higher", True, values),))

    def served(values):
        each = [{"id": str(i), "e2e_ms": value} for i, value in enumerate(values)]
        return CaseRecord("all", notes={"requests": each})

    of_round = sd(4, 1, served)
    assert of_round > 0 and sd(4, 4, served) == pytest.approx(2 * of_round)
    assert sd(16, 4, scored) == pytest.approx(2 * of_round)
