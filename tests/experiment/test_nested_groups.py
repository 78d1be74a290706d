"""Groups below engine: files of one's own for a part of the engine."""

import pytest
import yaml

from labkit.cli import hydra_arguments, multirun_composition
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import write_config

GROUPS = ("attention", "budget", "kv", "scheduler")


def cells_of(*words):
    command = multirun_composition.with_sweep_as_arms(hydra_arguments.parse([*words, "-m"]))
    return multirun_composition.compose_cells(command)


def engine_of(*words):
    (cell,) = cells_of(*words)
    return cell.experiment.engine


@pytest.fixture
def own(tmp_path):
    """A folder with a scheduler of one's own."""
    folder = tmp_path / "engine" / "scheduler"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("max_num_seqs: 8\nchunk: 64\n")
    multirun_composition.register()
    return "--config-dir", str(tmp_path)


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_a_nested_group_composes(group, composer):
    files = sorted((hydra_arguments.CONF / "engine" / group).glob("*.yaml"))
    assert files
    for file in files:
        needs = ["engine=contiguous"] if file.stem == "sdpa" else []
        with multirun_composition.initialized():  # a budget need not fit this machine's free memory
            composed = composer.compose([*needs, f"engine/{group}={file.stem}"])
        section = getattr(composed.engine, group)
        for key, value in yaml.safe_load(file.read_text()).items():
            chosen = getattr(section, key)
            assert getattr(chosen, "value", chosen) == value


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_file_of_one_s_own_is_chosen_with_and_without_a_plus(own, plus):
    scheduler = engine_of(*own, f"{plus}engine/scheduler=mine").scheduler
    assert (scheduler.max_num_seqs, scheduler.chunk) == (8, 64)
    typed = engine_of(*own, f"{plus}engine/scheduler=mine", "engine.scheduler.chunk=32")
    assert typed.scheduler.chunk == 32


def test_a_nested_group_may_be_the_default_of_an_experiment_and_an_arm_s_override(own, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /engine/scheduler: mine]\n"
    )
    arm = "+ablation.arms.static={engine/scheduler: static}"
    (cell,) = cells_of(*own, "experiment=mine", arm)
    schedulers = {name: one.engine.scheduler for name, one in cell.experiments.items()}
    assert schedulers["base"].chunk == schedulers["control"].chunk == 64
    assert schedulers["static"].admission.value == "static"


def test_choices_of_a_nested_group_are_swept_as_arms(own):
    (cell,) = cells_of(*own, "engine/scheduler=vllm,mine", "engine.kv.block_size=8,16")
    names = [arm.name for arm in cell.arms]
    assert names[:2] == ["scheduler=vllm,block_size=8", "scheduler=vllm,block_size=16"]
    assert "/" not in cell.name and cell.name.endswith("engine_scheduler=vllm,mine")


def test_the_baseline_of_swept_files_is_the_one_that_the_experiment_chooses(own, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /engine/scheduler: mine, override /engine: fast]\n"
    )
    (tmp_path / "engine" / "fast.yaml").write_text("defaults: [paged]\nthreads: 3\n")
    words = [*own, "experiment=mine"]
    (cell,) = cells_of(*words, "engine/scheduler=vllm,mine")
    assert cell.arms[0].name == "scheduler=mine"
    (cell,) = cells_of(*words, "engine=paged,fast")  # both files have the name "paged"
    assert cell.arms[0].name == "engine=fast"


def test_a_file_that_labkit_has_itself_is_refused_in_a_nested_group(own, tmp_path):
    (tmp_path / "engine" / "scheduler" / "vllm.yaml").touch()
    with pytest.raises(ConfigError, match=r"labkit has engine/scheduler/vllm\.yaml itself"):
        hydra_arguments.parse(list(own))


def test_an_unknown_file_is_refused_with_the_choices(own):
    with pytest.raises(ConfigError, match=r"no such engine/scheduler; must be one of: .*vllm"):
        cells_of(*own, "engine/scheduler=nope", "ablation=none")


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=mine"],
        ["experiment=mine", "scale=full", "engine.threads=1"],
        ["engine.kv.block_size=8,16", "workload=uniform"],
    ],
)
def test_the_config_that_hydra_records_and_an_arm_s_overrides_are_the_arm_s_config(tmp_path, words):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /ablation: kv_layout, override /workload: uniform]\n"
        "scales: {cpu: {workload.num_requests: 4}, full: {model: small}}\n"
    )
    multirun_composition.register()
    command = hydra_arguments.parse(["--config-dir", str(tmp_path), *words, "-m"])
    command = multirun_composition.with_sweep_as_arms(command)
    (cell,) = multirun_composition.compose_cells(command)
    hydra = [o for o in command.overrides if o.startswith("hydra")]
    task = [o for o in command.overrides if o not in hydra]
    with multirun_composition.initialized():
        write_config(tmp_path / "config.yaml", hydra, task)
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert recorded["ablation"]["arms"].keys() == {arm.name for arm in cell.arms[:-1]}
    for arm in cell.arms:
        expected = {key: recorded[key] for key in ("engine", "model", "workload", "seed")}
        for key, value in arm.overrides.items():
            if key == "engine":  # a file: its values are in the arm's config alone
                expected["engine"] = arm.config["engine"]
                continue
            *sections, option = key.split(".")
            section = expected
            for name in sections:
                section = section[name]
            section[option] = value
        assert arm.config == expected
