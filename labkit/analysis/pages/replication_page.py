"""``replication.md`` and ``.html``: an author's table beside the reader's, and many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
from pathlib import Path

from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import templates
from labkit.analysis.document.svg_chart_renderer import chart_svg
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.replication_result import MeasuredEffect, ReplicatedRow, Replication
from labkit.analysis.number_format import (
    UNKNOWN,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
    significant_text,
    unit_name,
    value_text,
)
from labkit.analysis.pages.article_from_records import html
from labkit.analysis.pages.markdown_report import markdown_html, markdown_table
from labkit.analysis.pages.report_files import write_text
from labkit.analysis.statistics.replication_test import ReplicationWord
from labkit.analysis.studies.study_discovery import is_cell, study_dirs
from labkit.config import count_text
from labkit.records import RecordError, write_json

FILE = "replication.json"
MAX_DEPTH = 3  # folders between the index and a replication.json
MAX_DRAWN = 40
ROW_HEIGHT = 30
STYLES = ("author", "reader")
Columns = Iterator[Column[ReplicatedRow]]


def decision_text(row: ReplicatedRow) -> str:
    """Return a row's decision: with the ratio of another size, or what a decision would take."""
    if row.verdict == ReplicationWord.other_size.value and row.ratio is not None:
        return f"{row.verdict} ({significant_text(row.ratio, 2)} times)"
    if row.verdict != ReplicationWord.not_decided.value or row.reason is not None:
        return ": ".join(filter(None, (row.verdict, row.reason)))
    if row.needed_s is None:
        return row.verdict
    minutes = math.ceil(row.needed_s / 60)
    time = f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"
    return f"{row.verdict} (a new study of design.time={time} would)"


def _table(page: Replication) -> Table[ReplicatedRow]:
    def side(heading: str, of: Callable[[ReplicatedRow], MeasuredEffect]) -> Columns:
        yield Column(heading, lambda row: _medians(row, of(row)))
        yield Column("effect", lambda row: percent_text(of(row).effect_pct))
        yield Column("interval", lambda row: interval_text(of(row).ci_low_pct, of(row).ci_high_pct))

    def region(row: ReplicatedRow) -> str:
        return UNKNOWN if row.region_pct is None else f"±{magnitude_text(row.region_pct)}%"

    named = {"cell": "cell", "row": "case", "metric": "metric", "arm": "arm"}
    columns = (
        *(Column(name, attrgetter(field), numeric=False) for name, field in named.items()),
        *side("author", lambda row: row.author),
        *side("here", lambda row: row.reader),
        Column("change", lambda row: percent_text(row.change_pct)),
        Column("interval", lambda row: interval_text(row.change_low_pct, row.change_high_pct)),
        Column("same within", region),
        Column("p", lambda row: p_text(row.p_adjusted)),
        Column("decision", decision_text, numeric=False),
    )
    several = len({row.cell for row in page.rows}) > 1
    return Table(columns if several else columns[1:], page.rows)


def _medians(row: ReplicatedRow, side: MeasuredEffect) -> str:
    if side.median is None:
        return UNKNOWN
    medians = " → ".join(value_text(v, row.unit) for v in (side.baseline_median, side.median))
    return f"{medians} {unit_name(row.unit)}".rstrip()


def _head(page: Replication) -> str:
    lines = [f"# Replication: {page.question}", "", f"**{page.answer}.**", ""]
    for name, side in (("Author", page.author), ("Here", page.reader)):
        digest = f", archive {side.archive_sha256[:12]}" if side.archive_sha256 else ""
        lines.append(f"- {name}: {side.study}{digest}, {side.date}, on {side.machine_text}")
    return "\n".join([*lines, "", ""])


def _body(page: Replication) -> str:
    versions = "the author's" if page.package_versions == "theirs" else "those of this machine"
    lines = ["## The author's table and this one", "", markdown_table(_table(page)), ""]
    lines += [METHOD.format(alpha=page.alpha), ""]
    lines += ["## What differs", "", f"- package versions: {versions}"]
    lines += [f"- the question: {change}" for change in page.changes]
    lines += [f"- {difference}" for difference in page.differences]
    return "\n".join([*lines, "", "This study's own report is [here](report.html).", ""])


METHOD = (
    "Only effects are compared, never the times of two machines. Change: the effect here against "
    "the author's, by joint relabelling of both studies within their blocks; p and intervals are "
    "adjusted over all rows (alpha {alpha:g}). A change counts as none if its interval lies within "
    "the half-width of the author's interval plus the author's margin, and within half of the "
    "author's effect."
)


def _picture(page: Replication) -> Chart | None:
    """Return both intervals of each row, the author's above the reader's."""
    rows = [row for row in page.rows if row.author.effect_pct is not None][:MAX_DRAWN]
    if not rows:
        return None
    sides = [side for row in rows for side in (row.author, row.reader)]
    chart = Chart(
        title="effects of the author and of the reader, with their intervals",
        x=padded_range([*(end for one in sides for end in one.known_pct), 0.0]),
        y=(0.0, float(len(rows))),
        x_label="difference from the baseline (%)",
        rows=tuple(map(page.name_of, rows)),
        row_height=ROW_HEIGHT,
    )
    chart.line([(0.0, 0.0), (0.0, float(len(rows)))], "zero")
    for place, side in enumerate(sides):
        style, y = STYLES[place % 2], len(rows) - place // 2 - (0.32, 0.68)[place % 2]
        if side.ci_pct is not None:
            chart.line([(end, y) for end in side.ci_pct], style)
        if side.effect_pct is not None:
            tip = f"{style}: {percent_text(side.effect_pct)} ({side.verdict})"
            chart.dot(side.effect_pct, y, style, tip=tip)
    return chart


def _replication_html(page: Replication) -> str:
    """Return the page in HTML. It loads nothing."""
    chart, left_out = _picture(page), len(page.rows) - MAX_DRAWN
    template = templates().get_template("replication.html.j2")
    text: str = template.render(
        page=page,
        head=markdown_html(_head(page), pictures=False),
        body=markdown_html(_body(page), pictures=False),
        picture="" if chart is None else chart_svg(chart),
        more=f"; the first {MAX_DRAWN} of {len(page.rows)} rows" if left_out > 0 else "",
    )
    return text


def write_replication(folder: Path, page: Replication) -> None:
    """Write ``replication.json``, ``replication.md`` and ``replication.html`` into a folder."""
    write_json(folder / FILE, page.to_json())
    write_text(folder / "replication.md", _head(page) + _body(page))
    write_text(folder / "replication.html", _replication_html(page))


def replication_files(root: Path) -> list[Path]:
    """Return what readers sent back, sorted: ``*replication*.json`` below a folder, no study's."""
    if not root.is_dir() or is_cell(root) or root in study_dirs(root):
        return []
    levels = ("*/" * depth for depth in range(MAX_DEPTH + 1))
    found = {path for level in levels for path in root.glob(f"{level}*replication*.json")}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _index(root: Path, refused: Mapping[str, str]) -> str:
    """Return a table of who replicated what and where, or why a file or study has no result."""
    words = [word.value for word in ReplicationWord]
    blank = [""] * (5 + len(words))
    lines = [(name, f"cannot run here: {reason}", *blank) for name, reason in refused.items()]
    for path in replication_files(root):
        name = path.relative_to(root).as_posix()
        try:
            page = Replication.read(path)
        except RecordError as error:
            lines.append((f"cannot be read: {error}", name, *blank))
            continue
        counts = (str(page.counts.get(word, 0)) for word in words)
        question = f"another: {', '.join(page.changes)}" if page.changes else "the same"
        machines = (page.author.machine_text, page.reader.machine_text, page.reader.date)
        lines.append((page.author.study, name, *machines, page.package_versions, question, *counts))
    headings = ("study", "file", "author's machine", "machine", "date", "versions", "question")
    numbered = enumerate((*headings, *words))
    columns = (Column(heading, itemgetter(i), numeric=False) for i, heading in numbered)
    return markdown_table(Table(tuple(columns), tuple(sorted(lines))))


def write_replications(root: Path, refused: Mapping[str, str] | None = None) -> str:
    """Write ``replications.md`` and ``.html``, return a line. ``refused``: by study, why."""
    count = count_text(len(replication_files(root)), "replication")
    if refused:
        count += f", {len(refused)} cannot run here"
    table = _index(root, refused or {})
    text = f"# Replications in {root.resolve().name}\n\n{count}.\n\n{table}\n"
    write_text(root / "replications.md", text)
    write_text(root / "replications.html", html(text, max_width="90rem", pictures=False))
    return f"{count}: {root / 'replications.md'} and {root / 'replications.html'}"
