"""The model of a cell, and ``cell.json``, its form on disk."""

import json
from dataclasses import replace

import pytest
from planted_cells import planted_cell

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.model.cell_model import Cell, Failure


def failing(record):
    if record.arm != "seq_map" or record.block:
        return record
    return replace(record, outcome="oom", detail="no memory", cases=(), notes={"log": "x.log"})


OPTIONS = {
    "kernel": {"skipped": {"prefill, 8 × 512": "no"}, "looks": [{"blocks": 4, "alpha": 0.01}]},
    "requests": {"requests": True, "identity": "tokens"},
    "failed": {"change": failing},
    "alone": {"effects": {}, "control": False},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_cell_is_read_back_from_its_file(make_cell, published, name):
    cell = analyse(make_cell(**OPTIONS[name], published=published, blocks=3)).cell
    content = json.loads(json.dumps(cell.to_json()))
    read = Cell.from_json(content)
    assert read == cell and json.dumps(read.to_json()) == json.dumps(content)


def test_only_a_known_cause_has_a_key():
    failure = Failure("b00-p01-map", "oom", "no memory")
    assert failure.arm == "map"
    cell = Cell(1, "c", None, None, (), None, {}, (), (failure,), {}, None)
    content = cell.to_json()
    assert content["failures"] == [{"run": failure.run, "outcome": "oom", "detail": "no memory"}]
    assert "sweep" not in content and content["scale"] is None
    older = {k: v for k, v in content.items() if k not in ("scale", "published", "design")}
    assert Cell.from_json({**older, "design": None}) == cell


def test_the_last_position_counts_a_run_whose_record_was_removed_before_it():
    runs = [{"file": f"runs/b00-p0{place}-a.json", "value": 1.0} for place in (0, 2)]
    values = {"median": 1.0, "q1": 1.0, "q3": 1.0, "n": 2, "runs": runs}
    row = {"case": "all", "metric": "x", "unit": "us", "arms": {"a": values}}
    cell = planted_cell([row], design={"alpha": 0.05, "order": [["a", "a"]]})
    assert (cell.design.num_runs, cell.last_position) == (2, 3)


def test_a_block_without_any_value_moves_no_later_run():
    """Both runs of the first block failed; the second block's began at the first position."""
    runs = [{"file": f"runs/b01-p0{place}-a.json", "value": 1.0} for place in (0, 1)]
    values = {"median": 1.0, "q1": 1.0, "q3": 1.0, "n": 2, "runs": runs}
    row = {"case": "all", "metric": "x", "unit": "us", "arms": {"a": values}}
    failures = [{"run": f"b00-p0{place}-a", "outcome": "oom"} for place in (0, 1)]
    design = {"alpha": 0.05, "order": [["a", "a"], ["a", "a"]]}
    cell = planted_cell([row], failures, design=design)
    assert list(cell.run_positions.values()) == [3, 4] and cell.last_position == 4
