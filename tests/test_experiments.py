"""The files of conf/experiment: each composes at its scales, and runs when made tiny."""

import json
import tempfile
from pathlib import Path

import hydra
import pytest
import yaml
from tiny_studies import InProcessLauncher, tiny_cell, tiny_words

from labkit.cli import hydra_arguments, multirun_composition
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError, Identity
from labkit.experiment.compose.cell_composer import _with_arm, compose_cell, with_scale_overrides
from labkit.experiment.hydra.hydra_composer import expand_sweep
from labkit.records import read_cell
from labkit.records.metric_registry import METRICS, OUTPUTS

EXPERIMENTS = sorted(path.stem for path in (hydra_arguments.CONF / "experiment").glob("*.yaml"))
# Experiments that are not run here: name and why, such as a server that must be there.
ELSEWHERE: dict[str, str] = {}
# Experiments that take longest, even tiny.
LONG = {
    *("batch_sizes", "case_study", "contiguous_vs_paged", "decode_burst", "decode_staggered"),
    *("kv_layouts", "latency_demo", "memory_cliff", "new_tokens", "padding_picture"),
    *("paged_throughput", "prefill_room", "serving_overhead", "snapshot", "wall", "waste_demo"),
}
# Ablations of the articles' mechanisms that no experiment contains.
MECHANISMS = (
    *(
        "block_size",
        "capture_sizes",
        "chunk_size",
        "composition",
        "free_list",
        "graph_replay",
        "grid",
    ),
    *("memory_fraction", "padded_gather", "preemption", "prefill_budget", "prefix_policies"),
    *("resolver", "speculation", "speculation_control", "split_kv", "tile_threshold"),
)
# Questions whose metric is not the article's, and why.
OWN_METRIC = {
    "memory_policies": "the share of memory taken and left; the article has ceilings",
    "new_tokens": "the time of a token alone; the article's includes the prompt",
}


def test_the_longest_experiments_exist():
    assert set(EXPERIMENTS) >= LONG


@pytest.fixture
def composer(composer):
    with multirun_composition.initialized():
        yield composer


def source(name):
    return Path(hydra_arguments.CONF, "experiment", f"{name}.yaml").read_text("utf-8")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_begins_with_its_command_and_says_its_scales(name):
    package, command, *rest = source(name).splitlines()
    assert package == "# @package _global_"
    assert command.startswith(f"# python -m labkit experiment={name}") and command.endswith(" -m")
    assert rest[0].startswith("# ")


def swept(name, *words):
    """Return the overrides of every cell that ``experiment=name -m`` runs."""
    multirun_composition.register()
    with multirun_composition.initialized():
        whole = hydra.compose("config", [f"experiment={name}", *words], return_hydra_config=True)
    return expand_sweep([], whole.hydra.sweeper.params)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_published_row_belongs_to_a_cell_of_the_sweep(name):
    published = yaml.safe_load(source(name)).get("ablation", {}).get("published") or {}
    conditions = [row["when"] for row in published.get("rows", []) if "when" in row]
    cells = swept(name) if conditions else []
    for when in conditions:
        wanted = {f"{key}={value}" for key, value in when.items()}
        assert any(wanted <= set(cell) for cell in cells), when


@pytest.mark.parametrize("name", ["decode_regimes", "burst_collapse"])
def test_a_sweep_of_models_has_the_dense_model_of_the_scale(name):
    for words, dense in {(): "tiny", ("scale=full",): "qwen3_0.6b"}.items():
        models = [cell[0] for cell in swept(name, *words)]
        assert set(models) == {f"model={dense}", "model=hybrid"}


def test_an_experiment_runs_the_sweep_of_its_file():
    def names(*words):
        command = hydra_arguments.parse([*words, "-m"])
        return [
            c.name.partition(",")[2]
            for c in multirun_composition.compose_cells(
                multirun_composition.with_sweep_as_arms(command)
            )
        ]

    multirun_composition.register()
    clients = [f"workload.concurrency={n}" for n in (1, 8, 16)]
    assert names("experiment=chat_clients") == clients
    assert names("experiment=chat_clients", "workload.concurrency=4") == ["workload.concurrency=4"]
    with pytest.raises(ConfigError, match=r"^experiment=chat_clients has a sweep of its own"):
        names("experiment=waste_demo,chat_clients")


def check_metrics(whole, name):
    """The question's metrics are known, and one of them is the article's if it published any."""
    asked, published = set(whole.primary_metrics), whole.ablation.published or {}
    assert asked and asked <= {*METRICS, OUTPUTS}
    rows = [row.get("metric", published.get("metric")) for row in published.get("rows", [])]
    articles = set(rows) & set(METRICS)
    agrees = not articles or articles & asked
    assert bool(agrees) is (name not in OWN_METRIC), (
        f"{asked} are asked, but published are {articles}"
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_composes_at_every_scale(name, composer):
    """At full too, which this machine may not be able to run."""
    whole = composer.compose(with_scale_overrides([f"experiment={name}"], composer))
    assert set(whole.scales) == {"cpu", "full"}, "an experiment says what it is at both scales"
    check_metrics(whole, name)
    for scale in whole.scales:
        cell = with_scale_overrides([f"experiment={name}", f"scale={scale}"], composer)
        composed = composer.compose(cell)
        assert composed.ablation.question.endswith("?")
        for arm, overrides in composed.ablation.arms.items():
            composer.compose(_with_arm(cell, overrides), f"arm {arm}: ")


def check_answer(cell, told):
    """The headline is about the question's metrics, each in its own words."""
    answer, asked = told["answer"], cell.metrics
    print(f"{cell.experiment.ablation.question}\n  {answer}")
    assert asked and answer.endswith("."), answer
    if told["failures"]:  # what an arm claims may not happen at this size
        return
    assert "not measured" not in answer and "No answer" not in answer, answer
    for name in asked:
        if name == OUTPUTS:
            assert answer.startswith("The outputs "), answer
        elif METRICS[name].computed:
            label = METRICS[name].label
            assert f"{label[0].upper()}{label[1:]} (computed)" in answer, answer
        else:
            assert "Estimate only (1 block of 1" in answer, answer
    assert not {"faster", "slower"} & set(answer.split()), answer


def run_tiny(command, name, composer, tmp_path):
    """Run a command's first cell, made tiny; return the cell and its study."""
    cell = tiny_cell(compose_cell([], [command, *tiny_words(name)], composer), name)
    study = StudyRunner(tmp_path / "study", [cell], InProcessLauncher([cell]))
    study.run(cell.name, study.out / cell.name)
    study.finish()
    return cell, study


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_an_ablation_of_a_mechanism_runs_tiny(name, composer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cell, study = run_tiny(f"ablation={name}", name, composer, tmp_path)
    cell_json, shown = read_cell(study.out / cell.name), capsys.readouterr().out
    assert cell_json["rows"], shown
    assert not [run for run in cell_json["failures"] if run["outcome"] != "vacuous"], shown
    assert cell_json["failures"] or cell_json["gates"]["identical"]["status"] != "fail", shown


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in EXPERIMENTS]
)
def test_it_runs_tiny(name, composer, tmp_path, monkeypatch, pictures, capsys):
    """In this process, without what a process has one of; it is reported, and nothing failed.

    What an arm claims may not happen at this size (``vacuous``).
    """
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cell, study = run_tiny(f"experiment={name}", name, composer, tmp_path)
    cell_json, shown = read_cell(study.out / cell.name), capsys.readouterr().out
    failed = [run for run in cell_json["failures"] if run["outcome"] != "vacuous"]
    assert cell_json["rows"] and not failed, shown
    # The noise floor is a control's, and there is none here.
    apart = cell.experiment.ablation.claims.identity is Identity.noise_floor
    vacuous = bool(cell_json["failures"])
    assert apart or vacuous or cell_json["gates"]["identical"]["status"] != "fail", shown
    assert vacuous or cell_json["gates"]["engaged"]["status"] != "fail", shown
    assert not [line for line in shown.splitlines() if "rows are padding" in line], shown
    check_answer(cell, json.loads((study.out / "study.json").read_text("utf-8"))["cells"][0])
    report = (study.out / "report.md").read_text("utf-8")
    assert f"# {cell.experiment.ablation.question} (scale=cpu)" in report
    assert all(figure.axes for figure in pictures) and pictures
