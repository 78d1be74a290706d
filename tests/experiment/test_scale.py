"""Scales of an experiment: their overrides, and those of the command line that win."""

import json

import pytest

from labkit.cli import hydra_arguments, multirun_composition, print_only_flags
from labkit.config import ConfigError


@pytest.fixture
def scaled(tmp_path):
    """A folder of one's own, whose experiment is larger at scale=full."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /workload: uniform]\n"
        "scales:\n"
        "  cpu: {workload.num_requests: 4}\n"
        "  full: {model: small, workload: ragged, workload.concurrency: 8}\n"
    )
    multirun_composition.register()
    return ["--config-dir", str(tmp_path), "experiment=mine"]


def cell_of(argv):
    (cell,) = multirun_composition.compose_cells(hydra_arguments.parse(argv))
    return cell


def test_a_scale_sets_groups_and_values_of_every_arm(scaled):
    small, full = cell_of(scaled), cell_of([*scaled, "scale=full"])
    assert small.experiment.workload.num_requests == 4
    assert small.experiments["control"].workload == small.experiment.workload
    assert (full.experiment.workload.name, full.experiment.model.name) == ("ragged", "small")
    assert full.experiments["base"].workload.concurrency == 8
    assert "scale=full" in full.name and "num_requests" not in small.name


def test_the_command_line_wins_over_a_scale(scaled):
    typed = cell_of([*scaled, "scale=full", "workload=chat", "workload.concurrency=2"])
    assert typed.experiment.workload.name == "chat"
    assert typed.experiment.workload.concurrency == 2
    assert typed.experiment.model.name == "small"


def test_a_scale_may_set_options_of_one_arm(scaled, tmp_path):
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text(
        "# @package _global_\n"
        "defaults: [override /ablation: kv_layout]\n"
        "scales: {cpu: {ablation.arms.padded: {engine.budget.bytes: 1048576}}}\n"
    )
    cell = cell_of([*scaled, "workload.num_requests=1"])
    (padded, contiguous) = (cell.experiments[arm].engine for arm in ("padded", "contiguous"))
    assert (padded.kv.layout.value, padded.budget.bytes) == ("padded", 1 << 20)
    assert contiguous.budget.bytes == 1 << 30


def test_a_scale_s_values_may_have_units(scaled, tmp_path):
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nscales: {cpu: {design.time: 10m}}\n")
    assert cell_of(scaled).experiment.design.time == 600


def test_a_scale_is_noted_in_the_manifest(scaled, tmp_path):
    from labkit.experiment.compose.cell_composer import to_cell
    from labkit.experiment.schedule.cell_manifest import write_manifest

    for name, words, scale in (
        ("full", [*scaled, "scale=full"], "full"), ("plain", ["workload=uniform"], None),
    ):  # fmt: skip
        write_manifest(to_cell(cell_of(words), tmp_path / name), 1)
        assert json.loads((tmp_path / name / "cell.json").read_text())["scale"] == scale


def test_an_unknown_scale_is_one_line(scaled, tmp_path):
    with pytest.raises(ConfigError, match=r"^scale=full: only an experiment has scales; set exp"):
        cell_of(["scale=full"])
    with pytest.raises(ConfigError, match=r"^scale=huge: must be one of: cpu, full"):
        cell_of([*scaled, "scale=huge"])
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nscales: {full: {}}\n")
    with pytest.raises(ConfigError, match=r"^scale=cpu: this experiment has only scale=full$"):
        cell_of(scaled)
    file.write_text("# @package _global_\nscales: {cpu: {}, laptop: {}}\n")
    with pytest.raises(ConfigError, match=r"^scales\.laptop: must be one of: cpu, full$"):
        cell_of(scaled)
    file.write_text("# @package _global_\nscales: {cpu: {workload.num_request: 4}}\n")
    with pytest.raises(ConfigError, match=r"^workload\.num_request=4: no option 'num_request'"):
        cell_of(scaled)


@pytest.mark.parametrize("topic", ["job", "all"])
def test_a_printed_config_has_its_scale(scaled, topic, capsys):
    print_only_flags.print_config(
        hydra_arguments.parse([*scaled, "scale=full", "workload.num_requests=3", "--cfg", topic])
    )
    printed = capsys.readouterr().out
    assert "concurrency: 8" in printed and "num_requests: 3" in printed
