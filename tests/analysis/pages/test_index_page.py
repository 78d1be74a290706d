"""The index of a folder of studies: questions, answers, dates, machines, and broken studies."""

import json
import shutil
from dataclasses import replace

import pytest

from labkit.analysis import write_study
from labkit.analysis.pages.index_page import render_index
from labkit.archive import archive_study
from labkit.report import main


def started(day):
    return lambda record: replace(record, started=f"2026-11-{day:02d}T10:00:{record.block:02d}Z")


@pytest.fixture
def studies(make_cell, tmp_path):
    """Return a folder of two reported studies, one of them two folders deep, and one unreported."""
    for folder, day in (("outputs/old", 3), ("outputs/2026-11-20/12-00-00", 20)):
        write_study(make_cell(f"{folder}/cell", change=started(day)).parent, plots=False)
    make_cell("outputs/unreported/cell", effects={"seq_map": 0.8}, change=started(9))
    return tmp_path / "outputs"


def rows(studies):
    return [line for line in render_index(studies, "md").splitlines() if line.startswith("| 2026")]


def test_the_index_has_question_answer_date_and_machine_newest_first(studies, capsys):
    assert main([str(studies)]) == 0
    assert capsys.readouterr().out.startswith("3 studies, 3 cells, 72 runs: ")
    page = (studies / "index.md").read_text("utf-8")
    listed = rows(studies)
    assert [row[2:12] for row in listed] == ["2026-11-20", "2026-11-09", "2026-11-03"]
    assert "[2026-11-20/12-00-00](2026-11-20/12-00-00/report.html)" in listed[0]
    answer = json.loads((studies / "old" / "study.json").read_text())["cells"][0]["answer"]
    for text in (answer, "Does a host-built map beat", "host abc", "healthy pass", " 24 "):
        assert text in listed[2]
    assert "takes 19.9 to 20.0 % less time per launch than binary_search" in listed[1]
    html = (studies / "index.html").read_text("utf-8")
    assert 'href="old/report.html"' in html and "<table>" in html
    assert main([str(studies)]) == 0
    assert (studies / "index.md").read_text("utf-8") == page


def test_a_study_that_has_grown_since_its_report_is_analysed(studies):
    path = studies / "old" / "study.json"
    study = json.loads(path.read_text())
    study["cells"][0] |= {"answer": "an answer of fewer runs", "runs": 18}
    path.write_text(json.dumps(study))
    assert "an answer of fewer runs" not in rows(studies)[2] and " 24 " in rows(studies)[2]


def test_an_older_study_is_listed_in_todays_words(studies):
    path = studies / "2026-11-20" / "12-00-00" / "study.json"
    study = json.loads(path.read_text())
    study["cells"][0] |= {"answer": "seq_map is 5 % faster", "verdicts": {"faster": 1}}
    path.write_text(json.dumps(study))
    assert "less time per launch" in rows(studies)[0]


def test_a_study_is_dated_by_its_first_run_and_placed_by_its_last(studies, make_cell):
    def change(record):
        days = {(0, 0): 1, (3, 5): 28}  # the first run, and the last
        day = days.get((record.block, record.position), 9)
        return replace(record, started=f"2026-11-{day:02d}T10:00:00Z")

    make_cell("outputs/long/cell", change=change)
    assert [row[2:12] for row in rows(studies)] == [
        "2026-11-01", "2026-11-20", "2026-11-09", "2026-11-03"
    ]  # fmt: skip


def test_an_edited_or_truncated_study_is_named_and_the_others_are_listed(studies, capsys):
    record = next((studies / "old" / "cell" / "runs").glob("*.json"))
    record.write_text(record.read_text().replace('"repeats": [', '"repeats": [7'))
    (studies / "unreported" / "cell" / "cell.json").write_text("{")
    assert main([str(studies)]) == 0
    assert "2 cannot be read" in capsys.readouterr().out
    lines = (studies / "index.md").read_text("utf-8").splitlines()
    errors = dict(line.split("cannot be read: ") for line in lines if "| cannot be read: " in line)
    (old, edited), (unreported, cut) = sorted(errors.items())
    assert "old" in old and "was edited after it was written" in edited
    assert "unreported" in unreported and "not valid JSON" in cut


def test_a_study_and_its_archive_beside_it_are_listed_once(studies):
    archive = studies / "old.zip"
    archive_study(studies / "old", archive)
    assert len(rows(studies)) == 3
    archive.rename(studies / "unreported.zip")  # of another study
    assert len(rows(studies)) == 4
    (studies / "old.zip").write_text("PK")
    assert "old.zip is not a study archive" in render_index(studies, "md")


def test_an_archive_that_was_not_unpacked_to_its_end_is_no_study(studies):
    shutil.copytree(studies / "old", studies / ".packed.123.tmp")
    assert len(rows(studies)) == 3


def test_formats_of_one_study_are_refused_for_several(studies, capsysbinary):
    assert main([str(studies), "--format", "csv"]) == 2
    assert b"--format csv needs one study, but" in capsysbinary.readouterr().err
    assert main([str(studies), "--format", "md"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"# Studies in outputs\n")


def test_a_study_and_an_empty_folder_are_no_index(studies, tmp_path, capsys):
    assert main([str(studies / "old")]) == 0
    assert not (studies / "old" / "index.md").exists()
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
