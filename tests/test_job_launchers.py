"""Job launchers: missing requirements, what a job receives, and the states of Slurm's queue."""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import hydra_plugins
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from labkit.cli import hydra_arguments, multirun_composition, run_study
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import compose_cell
from labkit.experiment.hydra import job_launchers

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """An environment in which everything is installed but Hydra's plugins."""
    import hydra

    folder = tmp_path_factory.mktemp("site")
    for path in Path(hydra.__file__).parents[1].iterdir():
        if not path.name.startswith(("hydra_plugins", "hydra_submitit", "hydra_joblib", "_")):
            (folder / path.name).symlink_to(path)
    path = os.pathsep.join([str(ROOT), str(folder)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("name", ["slurm", "joblib", "ray"])
def test_a_missing_extra_is_named_and_no_file_written(name, without_extras, tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-m", "labkit", f"hydra/launcher={name}", "seed=1,2", "-m"],
        cwd=tmp_path,
        env=without_extras,
        capture_output=True,
        text=True,
    )
    message = (
        f"labkit: hydra/launcher={name} is not installed; run: pip install 'mlx-labkit[{name}]'\n"
    )
    assert (done.returncode, done.stderr) == (2, message)
    assert list(tmp_path.iterdir()) == []


def launcher(*words):
    multirun_composition.register()
    return multirun_composition.launcher_of(hydra_arguments.parse(words))


def test_without_a_launcher_cells_run_in_this_process():
    assert launcher("seed=1").is_local and launcher("seed=1,2", "-m").is_local


def test_a_launcher_needs_cells_to_launch():
    pytest.importorskip("joblib")
    with pytest.raises(ConfigError, match=r"hydra/launcher=joblib launches .* add -m at the end"):
        launcher("hydra/launcher=joblib")
    assert not launcher("hydra/launcher=joblib", "-m").is_local


def test_missing_slurm_is_named(monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(job_launchers.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="hydra/launcher=slurm: srun is not installed here"):
        launcher("hydra/launcher=slurm", "-m")


def test_a_launched_study_has_an_absolute_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, overrides = run_study.study_folder(
        hydra_arguments.parse(["out=a b", "seed=1"]), absolute=True
    )
    assert out == tmp_path / "a b" and overrides == ["seed=1", f"out='{out}'"]
    out, overrides = run_study.study_folder(hydra_arguments.parse(["out=a"]), absolute=True)
    assert overrides == [f"out={tmp_path / 'a'}"]
    assert run_study.study_folder(hydra_arguments.parse(["out=a"])) == (Path("a"), ["out=a"])


def test_a_job_receives_no_cells_and_composes_its_own(tmp_path, monkeypatch):
    words = [f"seed={i}" for i in range(5)]
    multirun_composition.register()
    cells = multirun_composition.compose_cells(
        hydra_arguments.parse([f"seed={','.join(map(str, range(5)))}", "-m"])
    )
    study = StudyRunner(tmp_path, cells)
    sent = pickle.dumps(study)
    assert len(sent) < 1000
    ran = []
    there = pickle.loads(sent)
    monkeypatch.setattr("labkit.cli.study_runner._prepare", lambda overrides, show: None)
    monkeypatch.setattr(there, "_run", lambda cell, show, redo: ran.append(cell))
    with multirun_composition.initialized():
        for name in words[:2]:
            folder = tmp_path / name
            there.run(f"seed={name[5:]}", folder, lambda name=name: compose_cell([], [name]))
    assert [cell.name for cell in ran] == ["seed=0", "seed=1"]
    assert [arm.to_json() for arm in ran[1].arms] == [arm.to_json() for arm in cells[1].arms]


QUEUE = "7_0|RUNNING\n7_1|CONFIGURING\n7_2|COMPLETED\n7_3|NODE_FAIL\n9|PENDING\n"


def test_the_queue_says_which_jobs_have_ended_and_how():
    pytest.importorskip("submitit")
    from labkit.experiment.hydra.slurm_watcher import QueueWatcher

    watcher = QueueWatcher()
    jobs = [f"7_{i}" for i in (10, 0, 1, 2, 3)]
    for job in jobs:
        watcher.register_job(job)
    watcher._info_dict.update(watcher.read_info(QUEUE.encode()))
    assert watcher.jobs == ["7_0", "7_1", "7_2", "7_3", "7_10"]
    states = {job: watcher.get_state(job, "cache") for job in watcher.jobs}
    # A node that boots is not over, whatever submitit's own list says; 7_10 is forgotten.
    assert list(states.values()) == ["RUNNING", "RUNNING", "COMPLETED", "NODE_FAIL", "GONE"]
    over = [job for job in watcher.jobs if watcher.is_done(job, "cache")]
    assert over == ["7_2", "7_3", "7_10"]
    watcher._info_dict.update(watcher.read_info(b""))  # it forgets what has ended
    states = [watcher.get_state(job, "cache") for job in watcher.jobs]
    assert states == ["GONE", "GONE", "COMPLETED", "NODE_FAIL", "GONE"]


SEARCH = "hydra/sweeper=search"


class Search(Sweeper):
    """A sweeper that chooses chunks by the objectives of earlier trials."""

    chosen: ClassVar[list[tuple[str, float | None]]] = []

    def __init__(self, params):
        """Accept the searched options, as every sweeper does."""

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        self.chosen.clear()
        fixed = [argument for argument in arguments if "interval" not in argument]
        for number, chunk in enumerate((64, 9999, 32)):
            trial = f"engine.scheduler.chunk={chunk}"
            (done,) = self.launcher.launch([[*fixed, trial]], initial_job_idx=number)
            self.chosen.append((trial, done.return_value))


@pytest.fixture
def searching(monkeypatch):
    multirun_composition.register()
    module = ModuleType("hydra_plugins.search")  # Hydra loads plugins from this package alone
    monkeypatch.setattr(Search, "__module__", module.__name__)
    monkeypatch.setattr(module, "Search", Search, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hydra_plugins, "search", module, raising=False)
    Plugins.instance().register(Search)
    target = {"_target_": "hydra_plugins.search.Search", "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="search", node=target)
    monkeypatch.setattr(sys, "argv", ["labkit"])


def test_a_search_composes_each_trial_when_its_sweeper_has_chosen_it(
    searching, tmp_path, monkeypatch, capsys
):
    def run(study, name, folder, compose):
        study._composed[folder] = compose()

    def chunk(study, folder):
        return float(study._composed[folder].experiment.engine.scheduler.chunk)

    monkeypatch.setattr(StudyRunner, "run", run)
    monkeypatch.setattr(StudyRunner, "objective", chunk)
    monkeypatch.setattr(StudyRunner, "finish", lambda study, pictures: len(study._composed))
    words = [SEARCH, "engine.scheduler.chunk=interval(8,64)", "workload=uniform"]
    assert run_study.run(hydra_arguments.parse([*words, f"out={tmp_path / 'out'}", "-m"])) == 2
    assert [objective for _, objective in Search.chosen] == [64.0, None, 32.0]
    assert "not run: engine.scheduler.chunk=9999: must be 1 to" in capsys.readouterr().err
    recorded = (tmp_path / "out").glob("*chunk=32*/.hydra/config.yaml")
    assert "chunk: 32" in next(recorded).read_text()


def test_a_search_needs_m_and_this_process_and_its_sweep_makes_no_arms(searching):
    with pytest.raises(ConfigError, match="hydra/sweeper=search runs many trials; add -m"):
        launcher(SEARCH)
    with pytest.raises(ConfigError, match="its trials run one after the other"):
        launcher(SEARCH, "hydra/launcher=joblib", "-m")
    command = hydra_arguments.parse([SEARCH, "engine.kv.block_size=8,16", "-m"])
    assert multirun_composition.with_sweep_as_arms(command) == command
    (cell,) = multirun_composition.compose_cells(command)
    assert [arm.name for arm in cell.arms] == ["base", "control"]


def test_a_missing_sweeper_is_named_with_its_extra():
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is not None:
        pytest.skip("hydra-optuna-sweeper is installed")
    multirun_composition.register()
    with pytest.raises(ConfigError, match=r"pip install 'mlx-labkit\[optuna\]'"):
        multirun_composition.compose_cells(hydra_arguments.parse(["hydra/sweeper=optuna", "-m"]))
