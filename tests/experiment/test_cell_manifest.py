"""The manifest's design is fixed when a cell begins, and an edit of it is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from labkit.config import ConfigError, PlannedLook
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.records import DIGESTS_FILE, RecordError, check_digests, read_cell


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
