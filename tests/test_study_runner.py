"""The runner of a study: each cell runs and is analysed once."""

import dataclasses
import hashlib
import math
import random
import tempfile

import pytest
from planted_runs import PlantedRuns, kernel_fields

from labkit import analysis, config
from labkit.analysis.comparison import cell_analysis
from labkit.analysis.pages import matplotlib_figures
from labkit.analysis.studies import study_analysis
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.cli import study_runner as study_module
from labkit.cli.study_runner import StudyRunner
from labkit.experiment.compose.cell_composer import ComposedCell
from labkit.experiment.launch import child_process
from labkit.records import Arm, read_cell, read_runs


class Planted(PlantedRuns):
    """Arm ``other`` is 5 % slower."""

    def fields(self, run, cell):
        log = random.Random(f"{cell.name} {run.name}").gauss(0, 0.002)
        return kernel_fields(100 * math.exp(log + (0.05 if run.arm == "other" else 0.0)))


def composed(name, **design):
    case = config.Case(name="one", decode=1, context=16)
    one = config.Experiment(
        model=config.Model(shape=config.ModelShape()),
        workload=config.Workload(name="k", kind="kernel", cases=[case]),
        ablation=config.Ablation(arms={"base": {}, "other": {}}, question="Is it?"),
        design=config.Design(**{"blocks": 8, "runs_per_block": 1, **design}),
    )
    plain = config.to_plain(one)
    held = {key: plain[key] for key in ("engine", "model", "workload", "seed")}
    arms = [Arm("base", "baseline", {}, held), Arm("other", "arm", {}, held)]
    arms.append(Arm("control", "control", {}, held))
    experiments = dict.fromkeys(("base", "other", "control"), one)
    return ComposedCell(name, one, tuple(arms), experiments, config.Isolation.process)


@pytest.fixture
def analysed(monkeypatch, tmp_path):
    """The cells that were analysed, in order; nothing is prepared or drawn, the lock is ours."""
    seen = []
    real = cell_analysis.analyse

    def analyse(cell_dir, *others):
        seen.append(cell_dir.name)
        return real(cell_dir, *others)

    monkeypatch.setattr(study_analysis, "analyse", analyse)
    monkeypatch.setattr(matplotlib_figures, "write_figures", lambda *_: None)
    monkeypatch.setattr("labkit.workload.prepare", lambda experiment: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return seen


def test_a_study_of_ten_cells_makes_ten_analyses(analysed, tmp_path, capsys):
    cells = [composed(f"seed={i}") for i in range(10)]
    study = StudyRunner(tmp_path / "study", cells, Planted())
    for cell in cells:
        study.run(cell.name, study.out / cell.name)
    assert study.finish() == 0
    assert analysed == [cell.name for cell in cells]
    report = (study.out / "report.md").read_text()
    assert all(f"| {cell.name} | On this machine" in report for cell in cells)
    assert capsys.readouterr().out.count("On this machine other takes") == 10


def test_what_is_prepared_before_the_first_cell_is_not_prepared_again(
    analysed, tmp_path, monkeypatch, capsys
):
    prepared = []
    monkeypatch.setattr("labkit.workload.prepare", prepared.append)
    cells = [composed("one"), composed("two", alpha=0.04)]
    study = StudyRunner(tmp_path / "study", cells, Planted())
    study.prepare()
    assert prepared == [cell.experiment for cell in cells] and not study.out.exists()
    for cell in cells:
        study.run(cell.name, study.out / cell.name)
    assert len(prepared) == 2


def test_reports_while_running_take_at_most_a_tenth_of_the_time(analysed, tmp_path, monkeypatch):
    """A clock on which a report takes 1 s and all else nothing, but for 2 s a cell."""
    now, reports = [0.0], []
    monkeypatch.setattr(study_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(study_module.cell_runner, "run_cell", lambda *args, **more: None)
    monkeypatch.setattr(analysis, "write_cell", lambda *args: None)
    monkeypatch.setattr(analysis, "print_cell", lambda *args, **more: None)

    def report(*args, **more):
        reports.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(analysis, "write_study", report)
    study = StudyRunner(tmp_path / "study", [composed(f"seed={i}") for i in range(40)], Planted())
    for i in range(40):
        now[0] += 2.0
        study.run(f"seed={i}", study.out / f"seed={i}")
    assert 4 <= len(reports) <= 0.1 * now[0] + 1


def test_the_analysis_of_the_last_look_is_reused_for_the_cell(analysed, tmp_path):
    cell = composed("cell", blocks=12, looks=[config.PlannedLook(8, 0.02)])
    study = StudyRunner(tmp_path / "study", [cell], Planted())
    study.run("cell", study.out / "cell")
    assert study.finish() == 0 and analysed == ["cell"]
    design = read_cell(study.out / "cell")["design"]
    taken = [{"blocks": 8, "alpha": 0.02, "decided": True}]
    assert design["looks_taken"] == taken and design["shown"] == [8]


def test_new_runs_need_a_new_analysis(analysed, tmp_path):
    cell, analysis_cache = composed("cell"), AnalysisCache()
    study = StudyRunner(tmp_path / "study", [cell], Planted())
    study.run("cell", study.out / "cell")
    analysis_cache.cell(study.out / "cell")
    first = analysis_cache.cell(study.out / "cell")
    run = next((study.out / "cell" / "runs").glob("b07-*.json"))
    run.unlink()
    assert analysis_cache.cell(study.out / "cell") is not first
    assert analysed == ["cell"] * 3


@pytest.mark.parametrize("code", [1, 0])
def test_the_cells_of_a_study_have_one_history_of_launches(code, analysed, tmp_path, monkeypatch):
    """Their arms are the same: a preparation that fails, which may take long, is not repeated."""
    processes = []

    def run(command, *, log, **_):
        processes.append("prepare" if "--prepare" in command else "run")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("planted")
        return child_process.ProcessExit(code, False, 0, 0.1)

    monkeypatch.setattr(child_process, "run", run)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    cells = [composed(name, blocks=1) for name in ("a", "b")]
    study = StudyRunner(tmp_path / "study", cells)
    for cell in cells:
        study.run(cell.name, study.out / cell.name)
    first, second = (read_runs(study.out / name) for name in ("a", "b"))
    assert processes.count("prepare") == 1
    if code == 0:
        assert "predecessor" not in first[0].notes
        assert second[0].notes["predecessor"] == first[-1].arm
        return
    assert processes.count("run") == 0
    for record in (*first, *second):
        assert record.detail == "its preparation failed: planted"


def test_a_cell_stops_and_the_study_continues(analysed, tmp_path, capsys):
    class Full(Planted):
        def record(self, run, cell):
            if cell.name == "a":
                raise OSError(28, "No space left on device")
            return super().record(run, cell)

    cells = [composed("a"), composed("b")]
    study = StudyRunner(tmp_path / "study", cells, Full())
    for cell in cells:
        study.run(cell.name, study.out / cell.name)
    assert "labkit: a: " in capsys.readouterr().err
    assert study.finish() == 1


def test_a_study_with_the_names_of_an_earlier_version_resumes(tmp_path, monkeypatch, capsys):
    """A word stood for an arm of the command line in the folder's name."""
    from labkit.cli import hydra_arguments, multirun_composition

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    multirun_composition.register()
    words = ["+ablation.arms.other={engine.kv.block_size:32}", "design.blocks=2"]
    words += ["design.control=false", "design.isolation=process", f"out={tmp_path / 'study'}"]
    command = hydra_arguments.parse(words)

    launcher = Planted()

    def run():
        (cell,) = multirun_composition.compose_cells(command)
        study = StudyRunner(tmp_path / "study", [cell], launcher)
        study.refuse_changes()
        study.run(cell.name, study.out / cell.name)
        return cell

    (cell,) = multirun_composition.compose_cells(command)
    assert cell.name.startswith("+ablation.arms.other=_engine.kv.block_size_32_,design.control=")
    digest = hashlib.sha256(",".join(sorted(cell.overrides)).encode()).hexdigest()[:8]
    former = f"+other,design.control=false,design.isolation=process-{digest}"
    (tmp_path / "study" / former).mkdir(parents=True)
    assert run().name == former
    assert len(launcher.launched) == 4
    assert run().name == former
    assert len(launcher.launched) == 4
    assert [path.name for path in (tmp_path / "study").glob("*=*")] == [former]
    capsys.readouterr()


def test_a_study_with_two_runs_per_block_of_an_earlier_version_resumes(
    tmp_path, monkeypatch, capsys
):
    """They were the default in separate processes, so that no override names them."""
    from labkit.cli import hydra_arguments, multirun_composition

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    multirun_composition.register()
    words = ["ablation=composition", "design.control=false", "design.isolation=process"]
    words += ["workload.num_requests=null"]  # no pilot
    (today,) = multirun_composition.compose_cells(hydra_arguments.parse(words))
    design = dataclasses.replace(
        today.experiment.design, blocks=5, runs_per_block=2, looks=[config.PlannedLook(4, 0.02)]
    )
    experiment = dataclasses.replace(today.experiment, design=design)
    earlier = dataclasses.replace(today, experiment=experiment)

    def run(cell, killed_at=None):
        launcher, ran = Planted(), []
        launch = launcher.record

        def counted(run, cell):
            if run.block == killed_at:
                raise OSError(28, "No space left on device")
            ran.append(run.block)
            return launch(run, cell)

        launcher.record = counted
        study = StudyRunner(tmp_path / "study", [cell], launcher)
        study.refuse_changes()
        study.run(cell.name, study.out / cell.name)
        return ran

    runs = 2 * len(today.arms)
    assert run(earlier, killed_at=3) == [0] * runs + [1] * runs + [2] * runs
    resumed = run(today)
    assert resumed[:runs] == [3] * runs and set(resumed) <= {3, 4}
    assert run(today) == []
    manifest = read_cell(tmp_path / "study" / today.name)
    assert manifest["design"]["runs_per_block"] == 2
    assert [look["blocks"] for look in manifest["design"]["looks"]] == [4, 5]
    capsys.readouterr()
