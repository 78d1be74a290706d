"""The model of a cell, and ``cell.json``, its form on disk."""

import json
from dataclasses import replace

import pytest

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
