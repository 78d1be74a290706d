"""``python -m labkit.trace``: files for Perfetto and a page, from a folder and from an archive."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from traced_steps import traced_steps

from labkit import archive as archive_command
from labkit import report, trace
from labkit.analysis import write_study
from labkit.records import write_step_trace


@pytest.fixture
def traced_study(make_cell, tmp_path):
    """A study of two cells; the runs of the first block of one of them have traces."""

    def stored(record):
        if record.block or record.arm == "seq_map":
            return record
        note = write_step_trace(tmp_path / "study" / "traced", traced_steps())
        return replace(record, notes={**record.notes, "step_trace": note})

    make_cell("study/plain", requests=True)
    return make_cell("study/traced", requests=True, runs=1, change=stored).parent


def test_every_traced_run_and_a_page_are_written(traced_study, capsys):
    assert trace.main([str(traced_study)]) == 0
    paths = capsys.readouterr().out.split()
    names = sorted(path.rpartition("/")[2] for path in paths)
    runs = [name for name in names if name.startswith("traced--b00-p0")]
    assert len(runs) == 2 and names == sorted([*runs, "steps.html"])
    for path in paths[:-1]:
        events = json.loads(Path(path).read_text("utf-8"))["traceEvents"]
        assert len(events) > 100
    page = (traced_study / "traces" / "steps.html").read_text("utf-8")
    assert page.count("<option value=") == 2 and "<h2>traced</h2>" in page
    # The baseline first, the control last.
    assert re.findall(r"<option value=\"\d\">(\w+),", page) == ["binary_search", "control"]


def test_an_archive_gives_the_same_files_beside_it(traced_study, tmp_path, capsys):
    archive = tmp_path / "packed.zip"
    assert archive_command.main([str(traced_study), str(archive)]) == 0
    assert trace.main([str(traced_study)]) == trace.main([str(archive)]) == 0
    for path in (traced_study / "traces").glob("*.json"):
        packed = archive.with_suffix(".report") / "traces" / path.name
        assert packed.read_bytes() == path.read_bytes()


def test_a_study_without_traces_is_refused_in_one_line(make_cell, capsys):
    study = make_cell("bare/plain", requests=True).parent
    assert trace.main([str(study)]) == 2
    printed = capsys.readouterr().err
    assert "has no traced steps" in printed and "workload.step_trace=500" in printed
    assert printed.count("\n") == 1 and not (study / "traces").exists()


def test_a_trace_that_was_edited_is_refused_in_one_line(traced_study, capsys):
    (path,) = (traced_study / "traced" / "traces").iterdir()
    path.write_bytes(path.read_bytes() + b"x")
    assert trace.main([str(traced_study)]) == 2
    assert report.main([str(traced_study), "--format", "html"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("was edited after it was written") == printed.count("\n") == 2


def test_the_report_has_a_player_where_there_is_a_trace(traced_study):
    write_study(traced_study, plots=False)
    page = (traced_study / "report.html").read_text("utf-8")
    assert page.count('class="step-player"') == 1 and "A step, played" in page
    assert "A step, played" not in (traced_study / "report.md").read_text("utf-8")
