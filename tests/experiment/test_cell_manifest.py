"""The manifest's design is fixed when a cell begins, and an edit of it is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planted_runs import PlantedRuns

from labkit.analysis import write_cell
from labkit.config import ConfigError, PlannedLook
from labkit.experiment.cell import ALLOCATION
from labkit.experiment.schedule.cell_manifest import refuse_changes, write_manifest
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.records import DIGESTS_FILE, RecordError, check_digests, read_cell, write_json


def edit(path, **changes):
    data = json.loads(path.read_text())
    data.get("design", data).update(changes)
    path.write_text(json.dumps(data))


@pytest.fixture
def begun(make_cell):
    looks = [PlannedLook(10, 0.01), PlannedLook(12, 0.02), PlannedLook(16, 0.02)]
    cell = make_cell(blocks=16, looks=looks)
    write_manifest(cell, 10)
    return cell


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"alpha": 0.2}, r"alpha of its design is 0\.2, and the cell began with 0\.05"),
        ({"margin_pct": 9.0}, "margin_pct of its design is 9.0"),
        ({"metrics": ["request_s"]}, "metrics of its design is"),
        ({"looks": [{"blocks": 10, "alpha": 0.04}]}, "looks of its design is"),
        ({"looks": []}, "looks of its design is"),
    ],
)
def test_an_edited_design_is_named(begun, changes, named):
    read_cell(begun.dir)
    edit(begun.dir / "cell.json", **changes)
    for read in (read_cell, check_digests):
        with pytest.raises(RecordError, match=f"cell.json was edited: {named}"):
            read(begun.dir)
    with pytest.raises(ConfigError, match="was edited"):
        refuse_changes(begun)


def test_the_manifest_has_the_folders_of_the_users_files(begun, make_cell):
    assert "config_dirs" not in json.loads((begun.dir / "cell.json").read_text())
    cell = replace(make_cell(folder="other"), config_dirs=("my files", "b"))
    write_manifest(cell, 1)
    assert json.loads((cell.dir / "cell.json").read_text())["config_dirs"] == ["my files", "b"]


def test_an_edit_of_both_files_does_not_match_the_digest(begun):
    for name in ("cell.json", "design.json"):
        edit(begun.dir / name, alpha=0.2)
    with pytest.raises(RecordError, match=r"design\.json was edited after it was written"):
        read_cell(begun.dir)
    (begun.dir / "design.json").unlink()
    with pytest.raises(RecordError, match=r"design\.json is missing"):
        read_cell(begun.dir)


def test_what_may_change_is_not_an_edit(begun, make_cell):
    edit(begun.dir / "cell.json", blocks=12, shown=[10], order="another")
    read_cell(begun.dir)
    looks = [PlannedLook(10, 0.01), PlannedLook(12, 0.02), PlannedLook(20, 0.02)]
    write_manifest(make_cell(blocks=20, looks=looks), 20)  # the last look moves
    assert read_cell(begun.dir)["design"]["looks"][-1]["blocks"] == 20


def test_a_corrected_question_and_published_number_replace_the_first_ones(begun):
    edit(begun.dir / "cell.json", shown=[10])
    number = {"rows": [{"case": "all", "metric": "request_s", "delta_pct": {"b": -8.1}}]}
    write_manifest(replace(begun, question="corrected", published=number), 10)
    manifest = read_cell(begun.dir)
    assert (manifest["question"], manifest["published"]) == ("corrected", number)
    assert manifest["design"]["shown"] == [10]


def test_a_study_of_an_older_version_loads(begun):
    (begun.dir / "design.json").unlink()
    listed = (begun.dir / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (begun.dir / DIGESTS_FILE).write_text("".join(x for x in listed if "design.json" not in x))
    edit(begun.dir / "cell.json", alpha=0.2)
    assert read_cell(begun.dir)["design"]["alpha"] == 0.2


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
