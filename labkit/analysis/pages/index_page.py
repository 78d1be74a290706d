"""``index.md`` and ``index.html``: a folder of studies as one table, the newest study first.

Answers are read from ``study.json``, so a hundred studies are listed in seconds. A study without
that file is analysed. The digests of all records are checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.exports.tool_exports import FormatError
from labkit.analysis.model.study_model import CellEntry, Study
from labkit.analysis.pages.article_from_records import html
from labkit.analysis.pages.markdown_report import markdown_table
from labkit.analysis.pages.report_files import study_link, write_text
from labkit.analysis.pages.study_overview import gates_text
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_discovery import cell_dirs, listed_studies
from labkit.config import count_text
from labkit.records import (
    OLDER_VERDICTS,
    ArchivePath,
    RecordError,
    StudyPath,
    check_digests,
    open_study,
    parse_run_name,
    read_json,
    record_paths,
)

UNKNOWN = "unknown"


def index_markdown(root: Path, entries: Sequence[IndexEntry]) -> str:
    """Return the index in Markdown. Links are relative to ``root``."""
    table = markdown_table(_table(root, entries))
    return f"# Studies in {root.resolve().name}\n\n{_summary(entries)}.\n\n{table}\n"


def _table(root: Path, entries: Sequence[IndexEntry]) -> Table[IndexEntry]:
    return Table(
        (
            _column("date", lambda entry: entry.began[:10]),
            _column("study", lambda entry: study_link(root, entry.study)),
            _column("question", lambda entry: entry.cell.question),
            _column("answer", lambda entry: entry.cell.answer),
            _column("gates", lambda entry: gates_text(entry.cell.gates)),
            Column("runs", lambda entry: entry.cell.runs),
            _column("cell", lambda entry: entry.cell.cell),
            _column("machine", lambda entry: entry.cell.machine),
        ),
        tuple(entries),
    )


def _column(heading: str, value: Callable[[IndexEntry], Any]) -> Column[IndexEntry]:
    return Column(heading, value, numeric=False)


def _summary(entries: Sequence[IndexEntry]) -> str:
    studies = len({entry.study for entry in entries})
    text = "1 study" if studies == 1 else f"{studies} studies"
    broken = sum(entry.is_broken for entry in entries)
    cells = count_text(len(entries) - broken, "cell")
    runs = count_text(sum(entry.cell.runs for entry in entries), "run")
    text = f"{text}, {cells}, {runs}"
    return f"{text}; {broken} cannot be read" if broken else text


def render_index(root: Path, format_name: str) -> str:
    """Return the index as ``md`` or ``html``; raise ``FormatError`` for another format."""
    if format_name not in ("md", "html"):
        raise FormatError(f"--format {format_name} needs one study, but {root} holds several")
    text = index_markdown(root, _index_entries(root))
    return text if format_name == "md" else html(text, max_width="90rem")


def write_index(root: Path) -> str:
    """Write ``index.md`` and ``index.html`` into a folder of studies; return a summary."""
    entries = _index_entries(root)
    text = index_markdown(root, entries)
    write_text(root / "index.md", text)
    write_text(root / "index.html", html(text, max_width="90rem"))
    return f"{_summary(entries)}: {root / 'index.md'} and {root / 'index.html'}"


@dataclass(frozen=True)
class IndexEntry:
    """One cell of the index.

    ``began`` and ``ended``: when the first and the last run started, UTC, as in records.
    ``is_broken``: the study cannot be read; then the only answer is why.
    """

    study: Path  # the study's folder or archive
    cell: CellEntry = field(default_factory=CellEntry)
    began: str = ""
    ended: str = ""
    is_broken: bool = False


def _index_entries(root: Path) -> list[IndexEntry]:
    """Return an entry for each cell of each study in a folder, the newest study first."""
    by_study = [list(_entries(study)) for study in listed_studies(root)]
    by_study.sort(key=lambda entries: max(entry.ended for entry in entries), reverse=True)
    return [entry for entries in by_study for entry in entries]


def _entries(study: Path) -> Iterator[IndexEntry]:
    try:
        opened = open_study(study)
        cells = {path.name: path for path in cell_dirs(opened)}
        if not isinstance(opened, ArchivePath):  # an archive's digest is checked when it is opened
            for path in cells.values():
                check_digests(path)
        facts = [fact for fact in _facts(opened, cells) if fact.dir in cells]
        entries = [_entry(study, cells[fact.dir], fact) for fact in facts]
    except (RecordError, OSError) as error:
        yield IndexEntry(study, CellEntry(answer=f"cannot be read: {error}"), is_broken=True)
        return
    yield from entries


def _facts(study: StudyPath, cells: dict[str, StudyPath]) -> Sequence[CellEntry]:
    """Return the cells' entries in ``study.json``, or analyse them if it lacks runs or is older."""
    if (study / "study.json").is_file():
        listed = Study.from_json(read_json(study / "study.json")).cells
        older = any(word in OLDER_VERDICTS for entry in listed for word in entry.verdicts)
        runs = {entry.dir: entry.runs for entry in listed}
        current = all(runs.get(name) == len(record_paths(cells[name])) for name in cells)
        if current and not older:
            return listed
    return [cell_summary(analyse(path)).entry for path in cells.values()]


def _entry(study: Path, cell: StudyPath, fact: CellEntry) -> IndexEntry:
    name, machine, runs = fact.cell or cell.name, fact.machine or UNKNOWN, len(record_paths(cell))
    known = replace(fact, cell=name, machine=machine, runs=runs)
    return IndexEntry(study, known, *_started(cell))


def _started(cell: StudyPath) -> tuple[str, str]:
    """Return when the first and the last run of a cell started; empty without runs."""
    paths = sorted(record_paths(cell), key=lambda path: parse_run_name(path.stem))
    ends = [paths[0], paths[-1]] if paths else []
    times = [str(read_json(path).get("started", "")) for path in ends]
    return (times[0], times[-1]) if times else ("", "")
