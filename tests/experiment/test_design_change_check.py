"""A cell is not continued with other options, over a link, or without its first manifest."""

from __future__ import annotations

import json

import pytest
from planted_runs import PlantedRuns

from labkit.analysis import write_cell
from labkit.config import ConfigError
from labkit.experiment.cell import ALLOCATION
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.records import DIGESTS_FILE, write_json


@pytest.fixture
def begun(make_cell):
    cell = make_cell(blocks=2)
    write_manifest(cell, 2)
    return cell


def test_an_option_newer_than_the_study_is_at_its_default(begun):
    """Older versions wrote no such option, and so did a revision of labkit that an arm imports."""
    digests = begun.dir / DIGESTS_FILE
    digests.write_text("".join(x for x in digests.read_text().splitlines(True) if "arms/" not in x))
    for path in (begun.dir / "arms").glob("*.json"):
        data = json.loads(path.read_text())
        del data["config"]["engine"]["server"]["api_key"]
        path.write_text(json.dumps(data))
    refuse_changes(begun)
    data["config"]["engine"]["kv"]["block_size"] = 32
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"engine.kv.block_size was 32, now 16"):
        refuse_changes(begun)


@pytest.mark.parametrize("name", ["sitting.json", "runs/b00-p00-base.log", "runs/pending", "arms"])
def test_a_study_with_a_link_is_not_continued(begun, tmp_path, name):
    (tmp_path / "mine").mkdir()
    path = begun.dir / name
    if path.exists():
        path.rename(tmp_path / "away")
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(
        ConfigError, match=f"{name} is a link, and labkit writes a study to regular"
    ):
        refuse_changes(begun)


def test_a_cell_whose_manifest_was_lost_is_not_continued(make_cell):
    """Another design would be declared over results that were seen."""
    cell = make_cell(blocks=2)
    run_cell(cell, PlantedRuns())
    design = cell.dir / "design.json"
    before = design.read_bytes()
    (cell.dir / "cell.json").unlink()
    for again in (cell, make_cell(blocks=2, alpha=0.2)):
        with pytest.raises(ConfigError, match=r"cell\.json was lost, .*; restore it from a copy"):
            run_cell(again, PlantedRuns())
    assert design.read_bytes() == before and not (cell.dir / "cell.json").exists()
    for path in cell.paths.runs.glob("b01-*"):
        path.unlink()
    with pytest.raises(ConfigError, match="was lost"):
        refuse_changes(cell)
    (cell.dir / ALLOCATION).touch()
    refuse_changes(cell)  # killed before it was written, after a first block that was timed
    (cell.dir / ALLOCATION).unlink()
    design.unlink()
    refuse_changes(cell)  # or before both


def test_a_report_does_not_replace_a_lost_manifest(make_cell):
    """What it infers from the runs would be taken for the declared design."""
    cell = make_cell(blocks=2)
    run_cell(cell, PlantedRuns())
    (cell.dir / "cell.json").unlink()
    for _ in range(2):
        inferred = write_cell(cell.dir)
        assert inferred["design"]["declared"] is False
        assert not (cell.dir / "cell.json").exists()
    (cell.dir / "design.json").unlink()  # a study of an earlier version, whose report wrote it
    listed = (cell.dir / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (cell.dir / DIGESTS_FILE).write_text("".join(x for x in listed if "design.json" not in x))
    write_json(cell.dir / "cell.json", inferred)
    with pytest.raises(ConfigError, match=r"cell\.json was lost, .*; restore it from a copy"):
        run_cell(cell, PlantedRuns())
