"""Sweeps of options as arms: which commands become one cell, and with which arms."""

import doctest

import pytest

from labkit.cli import hydra_arguments, multirun_composition, run_study
from labkit.config import Ablation, ConfigError, arm_sweep
from labkit.experiment.compose.sweep_as_arms import sweep_as_arms
from labkit.experiment.hydra.hydra_composer import Composer

ORDER = "engine.scheduler.order=decode_first,prefill_first"
TOKENS = "engine.scheduler.max_num_batched_tokens=128,512"
SWEEP = (
    "++ablation.sweep={engine.scheduler.max_num_batched_tokens:[128,512],"
    "engine.scheduler.order:[decode_first,prefill_first]}"
)


@pytest.fixture(autouse=True)
def registered():
    multirun_composition.register()


def cells_of(*words):
    return multirun_composition.compose_cells(
        multirun_composition.with_sweep_as_arms(hydra_arguments.parse([*words, "-m"]))
    )


def test_the_docstrings_of_sweeps_hold():
    results = doctest.testmod(arm_sweep)
    assert results.attempted == 4 and results.failed == 0


def test_swept_options_become_one_sweep_of_arms():
    with multirun_composition.initialized():
        overrides = sweep_as_arms([TOKENS, "seed=3", ORDER], Composer())
    assert overrides == ["seed=3", "ablation=sweep", SWEEP]


def test_arms_are_all_combinations_with_the_configured_one_as_baseline():
    (cell,) = cells_of(TOKENS, ORDER, "design=quick")
    names = [arm.name for arm in cell.arms]
    assert sorted(names[:-1]) == [
        "max_num_batched_tokens=128,order=decode_first",
        "max_num_batched_tokens=128,order=prefill_first",
        "max_num_batched_tokens=512,order=decode_first",
        "max_num_batched_tokens=512,order=prefill_first",
    ]
    assert names[0] == "max_num_batched_tokens=512,order=decode_first"  # the defaults
    assert [cell.arms[0].role, cell.arms[-1].role] == ["baseline", "control"]
    assert cell.arms[0].overrides["engine.scheduler.max_num_batched_tokens"] == 512
    experiment = cell.experiments["max_num_batched_tokens=128,order=prefill_first"]
    scheduler = experiment.engine.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.order.value) == (128, "prefill_first")
    assert cell.experiment.ablation.question == "Which max_num_batched_tokens and order is best?"


def test_the_baseline_of_a_sweep_in_a_file_is_found_by_a_value_with_its_unit(tmp_path):
    """A command's values are numbers before they are compared; a file's are as it has them."""
    (tmp_path / "ablation").mkdir()
    text = "name: pools\narms: {base: {}}\nsweep: {engine.budget.bytes: [512MiB, 1GiB]}\n"
    (tmp_path / "ablation" / "pools.yaml").write_text(text)
    (cell,) = cells_of("--config-dir", str(tmp_path), "ablation=pools")
    assert cell.arms[0].overrides["engine.budget.bytes"] == "1GiB"  # the default
    assert cell.experiments[cell.arms[0].name].engine.budget.bytes == 1 << 30


def test_a_cell_is_named_by_its_sweep_as_it_was_typed():
    (cell,) = cells_of(TOKENS, "seed=3", "out=elsewhere")
    assert cell.name == f"ablation=sweep,{TOKENS},seed=3"
    assert cell.overrides == ("seed=3", "ablation=sweep", TOKENS)


def test_what_is_asked_still_makes_cells():
    cells = cells_of(TOKENS, "workload=chat,ragged", "ablation=none")
    assert [cell.experiment.workload.name for cell in cells] == ["chat", "ragged"]
    assert [len(cell.arms) for cell in cells] == [3, 3]


@pytest.mark.parametrize(
    "words",
    [
        ["workload.concurrency=1,2"],
        [TOKENS, "ablation=composition"],
        [TOKENS, "ablation=none,composition"],
        [TOKENS, "++scale=cpu,full"],
        [TOKENS, "hydra/launcher=joblib"],
        ["seed=1,2", "engine.threads=2"],
    ],
)
def test_other_sweeps_are_left_as_they_are(words):
    command = hydra_arguments.parse([*words, "-m"])
    assert multirun_composition.with_sweep_as_arms(command) == command


SEARCH = """
# @package _global_
defaults:
  - override /hydra/sweeper: own
hydra: {sweeper: {params: {engine.threads: "1,2"}}}
"""
PARAMS = """
# @package _global_
hydra: {sweeper: {params: {engine.kv.block_size: "8,16"}}}
"""


@pytest.fixture
def experiments(tmp_path):
    """The words of experiments with a sweeper of their own, and with a sweep."""
    for folder in ("experiment", "hydra/sweeper"):
        (tmp_path / folder).mkdir(parents=True)
    sweeper = "_target_: own.Sweeper\nn_trials: 12\nparams: null\n"
    (tmp_path / "hydra" / "sweeper" / "own.yaml").write_text(sweeper)
    (tmp_path / "experiment" / "search.yaml").write_text(SEARCH)
    (tmp_path / "experiment" / "params.yaml").write_text(PARAMS)
    return ["--config-dir", str(tmp_path)]


def test_a_search_or_a_sweep_of_an_experiment_makes_the_cells(experiments):
    block_sizes = "engine.kv.block_size=16,32"
    search = hydra_arguments.parse([*experiments, "experiment=search", block_sizes, "-m"])
    assert multirun_composition.with_sweep_as_arms(search) == search
    cells = cells_of(*experiments, "experiment=params", block_sizes, "workload=ragged")
    assert [cell.experiment.engine.kv.block_size for cell in cells] == [16, 32]
    assert {len(cell.arms) for cell in cells} == {2}


def test_the_plan_of_a_search_says_how_many_trials_there_are(experiments, monkeypatch, capsys):
    words = [*experiments, "experiment=search", "workload=ragged", "plan=true", "-m"]
    monkeypatch.chdir(experiments[-1])
    assert run_study.run(hydra_arguments.parse(words)) == 0
    said = "".join(capsys.readouterr())
    assert "this is one trial of a search by hydra/sweeper=own; 12 take about " in said


def test_a_workload_of_a_config_dir_is_swept_as_arms(tmp_path):
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "mine.yaml").write_text("defaults:\n  - chat\n\nnum_requests: 4\n")
    (cell,) = cells_of("--config-dir", str(tmp_path), "workload=mine", TOKENS)
    assert [arm.role for arm in cell.arms] == ["baseline", "arm", "control"]


def test_a_study_that_has_such_a_cell_continues_it(tmp_path):
    command = hydra_arguments.parse([TOKENS, f"out={tmp_path}", "-m"])
    assert multirun_composition.with_sweep_as_arms(command) != command
    (tmp_path / "engine.scheduler.max_num_batched_tokens=512").mkdir()
    assert multirun_composition.with_sweep_as_arms(command) == command


def test_groups_and_files_are_swept_by_name(tmp_path):
    (cell,) = cells_of("engine=paged,naive", "workload=chat")
    assert [arm.name for arm in cell.arms] == ["engine=paged", "engine=naive", "control"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = f"{tmp_path}/a,{tmp_path}/b"
    arms = arm_sweep.swept_overrides({"model.path": paths.split(",")})
    assert list(arms) == ["path=a", "path=b"]


def test_options_that_are_valid_only_with_a_swept_one_are_those_of_its_arms():
    backend, engines = "engine.attention.backend=sdpa", "engine=contiguous,padded"
    (cell,) = cells_of(backend, engines, "workload=ragged")
    assert [arm.name for arm in cell.arms] == ["engine=contiguous", "engine=padded", "control"]
    backends = {arm.engine.attention.backend for arm in cell.experiments.values()}
    assert backends == {"sdpa"}
    with multirun_composition.initialized():
        overrides = sweep_as_arms(["model=local", "model.path=a,b"], Composer())
    assert overrides == ["model=local", "ablation=sweep", "++ablation.sweep={model.path:[a,b]}"]


def test_lists_are_swept_and_named_by_their_items():
    sizes = "++ablation.sweep={engine.decode_sizes:[[4,16],[8]]}"
    (cell,) = cells_of("engine.decode_shape=captured", sizes, "workload=ragged")
    assert [arm.name for arm in cell.arms] == ["decode_sizes=4-16", "decode_sizes=8", "control"]
    arms = arm_sweep.swept_overrides({"engine.server.requirements": [[], ["vllm==0.31"]]})
    assert list(arms) == ["requirements=none", "requirements=vllm__0.31"]


def test_a_name_that_no_file_may_have_is_cut_and_ends_in_a_hash():
    for letter in "xд":
        paths = [f"/{letter * 149}{end}" for end in "ab"]
        names = list(arm_sweep.swept_overrides({"model.path": paths}))
        assert len({*names}) == 2 and all(name.startswith(f"path={letter}") for name in names)
        assert all(148 < len(name.encode()) <= 150 for name in names)
        Ablation(arms={name: {} for name in names})


@pytest.mark.parametrize(("one", "other"), [("/x/q4", "/y/q4"), ("Ab", "ab")])
def test_values_with_the_same_name_make_different_arms(one, other):
    """Some file systems do not tell letters' cases apart."""
    arms = arm_sweep.swept_overrides({"model.path": [one, other]})
    assert len(arms) == 2 and next(iter(arms)) == f"path={one.rpartition('/')[2]}"
    Ablation(arms={name: {} for name in arms})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("++ablation.sweep={workload.warmup:[1,2]}", "must be an option of engine or model"),
        ("++ablation.sweep={engine.threads:[1,1]}", "two or more different values"),
        ("++ablation.sweep={engine.threads:3}", "two or more different values"),
    ],
)
def test_a_sweep_of_something_else_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        cells_of(override)


def test_a_sweep_of_an_ablation_with_arms_is_refused():
    with pytest.raises(ConfigError, match="has 3 arms; a sweep needs an ablation with one arm"):
        cells_of("ablation=composition", "++ablation.sweep={engine.threads:[1,2]}")


def test_a_wrong_value_is_named_with_its_arm():
    with pytest.raises(ConfigError, match=r"arm block_size=7: engine\.kv\.block_size=7: must be 8"):
        cells_of("engine.kv.block_size=8,16,7")


def test_a_command_is_repeated_as_it_was_typed():
    typed = hydra_arguments.parse([TOKENS, "-m"])
    text = run_study._resuming_command(typed, ["ablation=sweep", SWEEP, "out=outputs/x"])
    assert text == f"python -m labkit {TOKENS} out=outputs/x -m"
