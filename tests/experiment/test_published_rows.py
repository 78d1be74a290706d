"""Published rows of a sweep: each cell shows the rows measured with its options."""

import pytest

from labkit.cli import hydra_arguments, multirun_composition
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import to_cell

ROWS = """
# @package _global_
defaults: [override /workload: uniform]
ablation:
  published:
    metric: total_tok_s
    rows:
      - {case: all, arms: {base: 1}}
      - {case: all, when: {workload.concurrency: 8}, arms: {base: 8}}
      - {case: all, when: {workload.concurrency: 16, workload: uniform}, arms: {base: 16}}
      - {case: all, when: {model: small, engine.kv.layout: paged}, arms: {base: 99}}
scales: {cpu: {}, full: {model: small}}
"""


@pytest.fixture
def cells(tmp_path):
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    multirun_composition.register()

    def compose(*words, text=ROWS):
        file.write_text(text.lstrip())
        argv = ["--config-dir", str(tmp_path), "experiment=mine", *words]
        return [
            to_cell(cell, tmp_path)
            for cell in multirun_composition.compose_cells(hydra_arguments.parse(argv))
        ]

    return compose


def numbers(cell):
    return [row["arms"]["base"] for row in cell.published["rows"]]


def test_a_row_is_shown_in_the_cells_that_have_its_values(cells):
    eight, sixteen = cells("workload.concurrency=8,16", "-m")
    assert (numbers(eight), numbers(sixteen)) == ([1, 8], [1, 16])
    assert all("when" not in row for row in eight.published["rows"])
    (full,) = cells("scale=full")
    assert numbers(full) == [1, 16, 99]


def test_a_condition_on_an_unknown_option_is_one_line(cells):
    with pytest.raises(ConfigError, match=r"when: workload\.clients: no such option"):
        cells(text=ROWS.replace("workload.concurrency: 8", "workload.clients: 8"))
