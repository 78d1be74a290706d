"""A plan's forecast for one minute: by earlier studies, by the doctor, or not known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from labkit import config
from labkit.analysis.statistics.power import single_row_mde_pct
from labkit.cli import hydra_arguments, multirun_composition, run_study
from labkit.config import Isolation
from labkit.experiment.compose.cell_composer import ComposedCell, to_cells
from labkit.experiment.schedule import (
    cell_runner,
    doctor_noise_cache,
    noise_history,
    pilot_and_allocation,
    plan_preview,
    power_forecast,
)
from labkit.experiment.schedule.case_time_allocation import CasePilot, CaseShare, CellPilot
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.experiment.schedule.noise_history import CellNoise, StudyHistory
from labkit.experiment.schedule.pilot_and_allocation import with_allocation
from labkit.records import Arm, read_cell, write_json
from labkit.workload.workload_protocols import START_SECONDS

TURNS, ALONE = Isolation.in_process, Isolation.process
PILOTS = {
    "kernels": PilotNoise(
        5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=2.0, separate_s=1.5
    ),
    "requests": PilotNoise(
        5, interleaved_sd=0.02, separate_sd=0.07, interleaved_s=3.0, separate_s=2.5
    ),
}


def composed(kernel=True, **engine):
    """A cell of two arms; ``engine`` is how the second one differs."""
    case = config.Case(name="one", decode=1, context=16)
    kernels = config.Workload(name="k", kind="kernel", cases=[case])
    parts = {
        "model": config.Model(shape=config.ModelShape()),
        "ablation": config.Ablation(arms={"base": {}}),
        "workload": kernels if kernel else config.Workload(),
    }
    engines = config.Engine(), config.Engine(**engine)
    one, other = (config.Experiment(engine=engine, **parts) for engine in engines)
    arms = Arm("base", "baseline", {}, {}), Arm("other", "arm", {}, {})
    return ComposedCell("cell", one, arms, {"base": one, "other": other}, TURNS)


def composed_of(*typed):
    multirun_composition.register()
    (cell,) = multirun_composition.compose_cells(hydra_arguments.parse(typed))
    return cell


def plan_of(cell, folder):
    (plan,) = plan_preview.plan_cells(cell, folder, StudyHistory(folder))
    return plan


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way=None: iter(()))
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", lambda kind: None)


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", PILOTS.get)


@pytest.fixture
def studied(monkeypatch):
    """Give a function that plants earlier studies: (folder, seconds of a block, sd) by way."""

    def plant(runs=1, **kept):
        def studies(self, cell, way):
            for path, _, _ in kept.get(way.value, ()):
                yield Path(path), {"design": {"runs_per_block": runs}, "path": path}

        known = {path: (s, sd) for way in kept.values() for path, s, sd in way}
        noise = {
            path: None if sd is None else CellNoise(sd, None, 4) for path, (_, sd) in known.items()
        }
        monkeypatch.setattr(StudyHistory, "studies", studies)
        monkeypatch.setattr(noise_history, "cell_noise", lambda data, metrics: noise[data["path"]])
        monkeypatch.setattr(noise_history, "median_block_s", lambda path: known[str(path)][0])

    return plant


def one_row(sd, blocks, runs):
    return single_row_mde_pct(sd, blocks, runs, 0.05, sd_df=4)


def message(cell, tmp_path=Path()):
    return power_forecast.one_minute_line(cell, StudyHistory(tmp_path))


def test_an_unknown_forecast_says_how_to_get_it():
    assert "not known" in message(composed()) and "python -m labkit.doctor" in message(composed())


def test_the_doctor_s_pilot_noise_is_used_by_kind_and_named(doctor):
    turns, alone = one_row(0.01, 30, 1), one_row(0.05, 20, 1)
    kernels = message(composed())
    assert (
        f"one minute detects {turns:.1f} % interleaved, {alone:.1f} % in separate processes"
        in kernels
    )
    assert "the doctor's short kernels, estimated" in kernels
    requests = message(composed(kernel=False))
    assert f"detects {one_row(0.02, 20, 1):.1f} % interleaved" in requests
    assert "the doctor's short requests, estimated" in requests


def test_pilot_noise_is_not_used_for_other_devices(doctor):
    emulated = composed(attention=config.Attention(device=config.Device.emulated))
    assert "not known" in message(emulated) and "run it once" in message(emulated)


def test_an_earlier_study_wins_over_the_doctor_for_each_isolation(doctor, studied):
    studied(in_process=[("out/one", 4.0, 0.03)])
    turns, alone = one_row(0.03, 15, 1), one_row(0.05, 20, 1)
    text = message(composed())
    assert f"detects {turns:.1f} % interleaved, {alone:.1f} % in separate processes" in text
    assert "out/one and the doctor's short kernels" in text


def test_an_earlier_study_s_runs_per_block_count(studied):
    studied(runs=2, process=[("out/one", 12.0, 0.03)])
    text = message(composed())
    assert (
        f"detects {one_row(0.03, 5, 2):.1f} % in separate processes; interleaved: not known" in text
    )
    assert text.endswith("noise from out/one)")


def test_a_study_with_noise_or_cost_missing_is_skipped(studied):
    halves = [("out/no_noise", 4.0, None), ("out/no_cost", None, 0.01), ("out/whole", 5.0, 0.02)]
    studied(in_process=halves)
    text = message(composed())
    assert f"detects {one_row(0.02, 12, 1):.1f} % interleaved" in text and "out/whole" in text


def test_a_minute_with_too_few_blocks_detects_nothing(studied):
    studied(in_process=[("out/slow", 11.0, 0.01)])
    assert "detects nothing (too few blocks fit) interleaved" in message(composed())


def test_arms_that_cannot_interleave_get_no_interleaved_forecast(doctor):
    apart = message(composed(kernel=False, blas=config.Blas.stock))
    assert (
        f"one minute detects {PILOTS['requests'].separate_pct:.1f} % in separate processes; "
        "in processes that take turns: not known (" in apart
    )
    assert "interleaved" not in apart


def test_the_plan_prints_the_forecast_once(doctor, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    multirun_composition.register()
    overrides = ("ablation=seq_map", "design=strict", "plan=true", "workload=kernel_decode")
    assert run_study.run(hydra_arguments.Command((), overrides, multirun=False)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("one minute detects") == 1
    assert f"one minute detects {PILOTS['kernels'].interleaved_pct:.1f} % interleaved" in text


@pytest.mark.parametrize("isolation", ["in_process", "live", "process"])
def test_a_plan_has_as_many_blocks_as_were_typed(tmp_path, isolation):
    typed = ["ablation=seq_map", "workload=kernel_decode", "design.blocks=6"]
    plan = plan_of(composed_of(*typed, f"design.isolation={isolation}"), tmp_path)
    assert plan.cell.design.blocks == 6 and plan.runs == 6 * 3


@pytest.mark.parametrize(
    ("time_s", "engine", "seconds"),
    [(20, "openai", 6 * 3 * (1.5 + 5)), (600, "openai", 600), (20, "paged", 20)],
)
def test_a_plan_says_that_starting_its_servers_takes_longer_than_its_time(
    tmp_path, time_s, engine, seconds
):
    second = "engine.server.most_late_ms: 9" if engine == "openai" else "engine.dtype: float32"
    typed = ["ablation=none", "workload=chat", f"+ablation.arms.two={{{second}}}"]
    typed += [f"engine={engine}", f"design.time={time_s}", "workload.num_requests=0"]
    plan = plan_of(composed_of(*typed), tmp_path)
    assert plan.seconds == pytest.approx(seconds)
    late = "6 blocks take at least about 1 min 57 s, longer than design.time=0:20: fewer could"
    assert any(line.startswith(late) for line in plan.timing) is (seconds > time_s)


def test_a_plan_of_a_study_that_is_continued_has_the_seconds_of_its_allocation(tmp_path):
    typed = ["ablation=seq_map", "workload=kernel_decode", "design.time=1800"]
    composed = composed_of(*typed)
    (cell,) = to_cells(composed, tmp_path / composed.name)
    shares = [CaseShare(case, 12, 40, 0.9, 100.0) for case in cell.cases]
    pilot = CellPilot(1.0, tuple(CasePilot(case, 0.1, 0.1, 0.05, 9) for case in cell.cases))
    found = {"time_s": 1800, "blocks": 12, "looks": [], "seconds": 1710.0}
    found |= {"cases": list(map(asdict, shares)), "pilot": asdict(pilot)}
    cell.dir.mkdir()
    (cell.dir / "allocation.json").write_text(json.dumps(found))
    write_manifest(with_allocation(cell), 12)
    plan = plan_of(composed, tmp_path)
    assert plan.to_run == 36 and plan.seconds == pytest.approx(1710)


def planned(tmp_path, *typed):
    overrides = ["ablation=seq_map", "workload=kernel_decode", "workload.repeats=15"]
    return plan_of(composed_of(*overrides, "design.blocks=6", *typed), tmp_path)


def test_a_plan_takes_as_long_as_the_newest_study_of_the_same_arms(tmp_path, monkeypatch):
    def studies(self, cell, way=None):
        for folder in block_s:
            design = {"runs_per_block": 2}
            yield Path(folder), {"design": design | {"units": 32} if folder == "fewer" else design}

    block_s = {"others": 1.0, "fewer": 1.0, "unfinished": None, "newest": 12.0, "older": 1.0}
    monkeypatch.setattr(noise_history, "has_arms", lambda path, arms: str(path) != "others")
    monkeypatch.setattr(StudyHistory, "studies", studies)
    monkeypatch.setattr(noise_history, "median_block_s", lambda path: block_s[str(path)])
    plan = planned(tmp_path)
    assert plan.seconds == pytest.approx(6 * 12.0 / 2) and plan.measured_in == "newest"


def test_a_plan_says_that_fixed_runs_take_longer_than_the_time(tmp_path):
    line = "longer than design.time=0:01: design.blocks and the workload fix the runs"
    assert planned(tmp_path, "design.time=1").timing == (line,)
    assert planned(tmp_path, "design.time=6000").timing == ()


@pytest.fixture
def begun(tmp_path):
    """A cell of 8 blocks, none of which is run, in the folder that its plan looks into."""
    overrides = ["ablation=seq_map", "workload=kernel_decode", "workload.repeats=15"]

    def composed(*typed):
        return replace(composed_of(*overrides, *typed), name="cell")

    (cell,) = to_cells(composed("design.blocks=8"), tmp_path / "cell")
    write_manifest(cell, 8)

    return cell, lambda *typed: plan_of(composed(*typed), tmp_path)


def test_a_plan_of_a_continued_study_says_what_its_run_will(begun, monkeypatch):
    cell, plan = begun
    monkeypatch.setattr(cell_runner, "_another_host", lambda cell, records: "from another host")
    assert "from another host" in plan("design.blocks=8").warnings
    manifest = read_cell(cell.dir)
    manifest["design"]["shown"] = [8]
    write_json(cell.dir / "cell.json", manifest)
    assert any("is exploratory" in line for line in plan("design.blocks=30").warnings)


def test_a_plan_has_the_blocks_that_are_repeated(begun, monkeypatch):
    (_, plan), redone = begun, []
    repeat = lambda cell, redo_failed: redone.append(redo_failed) or []  # noqa: E731
    monkeypatch.setattr(plan_preview, "unfinished", repeat)
    plan("design.blocks=8"), plan("design.blocks=8", "redo=failed")
    assert redone == [False, True]


def test_a_plan_leaves_out_the_arms_that_looks_have_dropped(begun):
    cell, plan = begun
    manifest = read_cell(cell.dir)
    look = {"blocks": 4, "alpha": 0.01, "decided": False, "kept": ["binary_search", "control"]}
    manifest["design"]["looks_taken"] = [look]
    write_json(cell.dir / "cell.json", manifest)
    assert plan("design.blocks=8").runs == 4 * 3 + 4 * 2


def test_the_blocks_of_a_confirming_cell_are_those_that_were_declared(tmp_path):
    typed = ["ablation=seq_map", "workload=kernel_decode", "design=quick", "design.confirm=8"]
    composed = composed_of(*typed)
    _, confirming = plan_preview.plan_cells(composed, tmp_path, StudyHistory(tmp_path))
    assert confirming.cell.design.blocks == 8
    assert not any("instead of" in line for line in confirming.warnings)


def test_a_plan_counts_the_rounds_of_its_own_arms(tmp_path, monkeypatch):
    """A pilot's round is one of all arms of its study."""
    typed = ["ablation=seq_map", "workload=kernel_decode", "design.time=60"]
    composed = composed_of(*typed)
    pilot = CellPilot(1.0, tuple(CasePilot(c, 5.0, 5.0, 0.05, 9) for c in ("a", "b")))
    monkeypatch.setattr(pilot_and_allocation, "earlier_pilot", lambda folder: pilot)
    blocks = []
    for arms in (3, 6):
        manifest = {"arms": [{}] * arms, "design": {"runs_per_block": 1}, "rows": []}
        study = Path("o"), manifest
        monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way, it=study: iter([it]))
        blocks.append(plan_of(composed, tmp_path).seconds)
    assert blocks[1] < 0.7 * blocks[0]


@pytest.mark.parametrize("runs", [1, 2])
def test_a_plan_counts_the_runs_of_its_own_blocks(tmp_path, monkeypatch, runs):
    """A block of two runs per arm takes twice as long as one of one."""
    study = Path("o"), {"arms": [{}] * 3, "design": {"runs_per_block": 2}, "rows": []}
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way=None: iter([study]))
    monkeypatch.setattr(noise_history, "median_block_s", lambda folder: 12.0)
    typed = ["ablation=seq_map", "workload=kernel_decode", "workload.repeats=15"]
    design = [f"design.runs_per_block={runs}", "design.isolation=process", "design.time=120"]
    plan = plan_of(composed_of(*typed, *design), tmp_path)
    assert plan.timing == (f"a block takes {6 * runs} s",)
    assert plan.seconds == pytest.approx(120)


def test_a_process_that_arms_share_starts_once(tmp_path):
    shared = planned(tmp_path, "design.isolation=in_process")
    apart = planned(tmp_path, "design.isolation=process")
    assert shared.measured_in is None
    assert apart.seconds - shared.seconds == pytest.approx((6 * 3 - 6) * START_SECONDS)


TEN = ("design.blocks=10", "design.looks=[{blocks: 8, alpha: 0.02}]")
EIGHT = ("design.blocks=8", "design.looks=[{blocks: 8, alpha: 0.02}, {blocks: 12, alpha: 0.03}]")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("ablation=seq_map", *TEN), "looks after blocks 8 (alpha 0.02), 10 (alpha 0.03)"),
        (("ablation=seq_map", *EIGHT), "looks after blocks 8 (alpha 0.02) start-up"),
        (("ablation=forward", *TEN), None),  # three arms: .023 is the smallest p after 8 blocks
        (("ablation=forward", "design.alpha=0.005"), "at least 11 blocks"),
    ],
)
def test_a_plan_has_the_looks_that_can_decide(overrides, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    multirun_composition.register()
    command = hydra_arguments.Command((), (*overrides, "plan=true"), multirun=False)
    assert run_study.run(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert line in text if line else "looks after" not in text
