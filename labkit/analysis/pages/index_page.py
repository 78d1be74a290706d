"""``index.md`` and ``index.html``: a folder of studies as one table, the newest study first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.exports.tool_exports import FormatError
from labkit.analysis.pages.article import html
from labkit.analysis.pages.markdown_report import markdown_table
from labkit.analysis.pages.report_files import report_dir, write_text
from labkit.analysis.pages.study_overview import gates_text
from labkit.analysis.studies.study_index import IndexEntry, index_entries
from labkit.config import count_text


def index_markdown(root: Path, entries: Sequence[IndexEntry]) -> str:
    """Return the index in Markdown. Links are relative to ``root``."""
    table = markdown_table(_table(root, entries))
    return f"# Studies in {root.resolve().name}\n\n{_summary(entries)}.\n\n{table}\n"


def _table(root: Path, entries: Sequence[IndexEntry]) -> Table[IndexEntry]:
    return Table(
        (
            _column("date", lambda entry: entry.began[:10]),
            _column("study", lambda entry: _study_link(root, entry)),
            _column("question", lambda entry: entry.question),
            _column("answer", lambda entry: f"cannot be read: {entry.error}" if entry.error
                    else entry.answer),
            _column("gates", lambda entry: gates_text(entry.gates or {})),
            Column("runs", lambda entry: entry.runs),
            _column("cell", lambda entry: entry.cell),
            _column("machine", lambda entry: entry.machine),
        ),
        tuple(entries),
    )  # fmt: skip


def _column(heading: str, value: Callable[[IndexEntry], Any]) -> Column[IndexEntry]:
    return Column(heading, value, numeric=False)


def _study_link(root: Path, entry: IndexEntry) -> str:
    name = entry.study.relative_to(root).as_posix()
    pages = (report_dir(entry.study) / page for page in ("report.html", "report.md"))
    target = next((page for page in pages if page.is_file()), entry.study)
    return f"[{name}]({quote(target.relative_to(root).as_posix(), safe='/=,+~._-')})"


def _summary(entries: Sequence[IndexEntry]) -> str:
    studies = len({entry.study for entry in entries})
    text = "1 study" if studies == 1 else f"{studies} studies"
    broken = sum(entry.error is not None for entry in entries)
    cells = count_text(len(entries) - broken, "cell")
    runs = count_text(sum(entry.runs for entry in entries), "run")
    text = f"{text}, {cells}, {runs}"
    return f"{text}; {broken} cannot be read" if broken else text


def render_index(root: Path, format_name: str) -> str:
    """Return the index as ``md`` or ``html``.

    Raises
    ------
    RecordError
        The folder does not exist, or holds no study.
    FormatError
        ``format_name`` is neither ``md`` nor ``html``.
    """
    if format_name not in ("md", "html"):
        raise FormatError(f"--format {format_name} needs one study, but {root} holds several")
    text = index_markdown(root, index_entries(root))
    return text if format_name == "md" else html(text, max_width="90rem")


def write_index(root: Path) -> str:
    """Write ``index.md`` and ``index.html`` into a folder of studies; return a summary.

    Raises
    ------
    RecordError
        The folder does not exist, or holds no study. Nothing has been written.
    """
    entries = index_entries(root)
    text = index_markdown(root, entries)
    write_text(root / "index.md", text)
    write_text(root / "index.html", html(text, max_width="90rem"))
    return f"{_summary(entries)}: {root / 'index.md'} and {root / 'index.html'}"
