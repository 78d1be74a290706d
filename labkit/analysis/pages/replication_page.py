"""``replication.md`` and ``.html``: an author's table beside the reader's, and many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.svg_elements import chart_svg
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.analysis.model.replication_model import (
    MeasuredEffect,
    ReplicatedRow,
    Replication,
    ReplicationSide,
)
from labkit.analysis.number_format import (
    UNKNOWN,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
    significant_text,
    value_text,
)
from labkit.analysis.pages.article import html
from labkit.analysis.pages.html_report import TEMPLATES
from labkit.analysis.pages.markdown_report import markdown_table
from labkit.analysis.pages.report_files import write_text
from labkit.analysis.statistics.replication_test import ReplicationWord
from labkit.analysis.studies.study_analysis import is_cell
from labkit.analysis.studies.study_index import study_dirs
from labkit.config import count_text
from labkit.records import RecordError, write_json

FILE = "replication.json"
MAX_DEPTH = 3  # folders between the index and a replication.json
MAX_DRAWN = 40
ROW_HEIGHT = 30


def decision_text(row: ReplicatedRow) -> str:
    """Return a row's decision: with the ratio of another size, or what a decision would take."""
    if row.verdict == ReplicationWord.other_size.value and row.ratio is not None:
        return f"{row.verdict} ({significant_text(row.ratio, 2)} times)"
    if row.verdict != ReplicationWord.not_decided.value:
        return row.verdict
    if row.reason is not None:
        return f"{row.verdict}: {row.reason}"
    if row.needed_s is None:
        return row.verdict
    return f"{row.verdict} (design.time={_time_text(row.needed_s)} would)"


def _time_text(seconds: float) -> str:
    """Return a time that ``design.time`` takes, rounded up."""
    minutes = -(-seconds // 60)
    return f"{minutes:.0f}m" if minutes < 120 else f"{-(-minutes // 60):,.0f}h"


def _table(page: Replication) -> Table[ReplicatedRow]:
    several = len({row.cell for row in page.rows}) > 1
    cell = (Column[ReplicatedRow]("cell", lambda row: row.cell, numeric=False),)
    return Table(
        (
            *(cell if several else ()),
            Column("row", lambda row: row.case, numeric=False),
            Column("metric", lambda row: row.metric, numeric=False),
            Column("arm", lambda row: row.arm, numeric=False),
            Column("author", lambda row: _medians(row, row.author)),
            Column("effect", lambda row: percent_text(row.author.effect_pct)),
            Column("interval", lambda row: _interval(row.author)),
            Column("here", lambda row: _medians(row, row.reader)),
            Column("effect", lambda row: percent_text(row.reader.effect_pct)),
            Column("interval", lambda row: _interval(row.reader)),
            Column("change", lambda row: percent_text(row.change_pct)),
            Column("interval", _change_interval),
            Column("same within", _region),
            Column("p", lambda row: p_text(row.p_adjusted)),
            Column("decision", decision_text, numeric=False),
        ),
        page.rows,
    )


def _medians(row: ReplicatedRow, side: MeasuredEffect) -> str:
    if side.median is None:
        return UNKNOWN
    return " → ".join(value_text(v, row.unit) for v in (side.baseline_median, side.median))


def _interval(side: MeasuredEffect) -> str:
    return interval_text(side.ci_low_pct, side.ci_high_pct)


def _change_interval(row: ReplicatedRow) -> str:
    return interval_text(row.change_low_pct, row.change_high_pct)


def _region(row: ReplicatedRow) -> str:
    return UNKNOWN if row.region_pct is None else f"±{magnitude_text(row.region_pct)}%"


def replication_markdown(page: Replication) -> str:
    """Return the page in Markdown, without the picture."""
    return "\n".join((*_head(page), *_body(page)))


def _head(page: Replication) -> Iterator[str]:
    yield from (f"# Replication: {page.question}", "", f"**{page.answer}.**", "")
    for name, side in (("Author", page.author), ("Here", page.reader)):
        yield from (f"- {name}: {_side_text(side)}",)
    yield ""


def _side_text(side: ReplicationSide) -> str:
    digest = f", archive {side.archive_sha256[:12]}" if side.archive_sha256 else ""
    return f"{side.study}{digest}, {side.date}, on {side.machine_text}"


def _body(page: Replication) -> Iterator[str]:
    yield from ("## The author's table and this one", "", markdown_table(_table(page)), "")
    yield from (METHOD.format(alpha=page.alpha), "")
    yield from (f"{note}.\n" for note in page.notes)
    yield from ("## What differs", "")
    versions = "the author's" if page.package_versions == "theirs" else "those of this machine"
    yield from (f"- package versions: {versions}",)
    yield from (f"- the question: {change}" for change in page.changes)
    yield from (f"- {difference}" for difference in page.differences)
    yield from ("", "What weakens this study is in [its own report](report.html).", "")


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
    sides = [side for row in rows for side in (row.author, row.reader)]
    known = [
        value
        for side in sides
        for value in (side.effect_pct, side.ci_low_pct, side.ci_high_pct)
        if value is not None
    ]
    if not rows:
        return None
    chart = Chart(
        title="effects of the author and of the reader, with their intervals",
        x=padded_range([*known, 0.0]),
        y=(0.0, float(len(rows))),
        x_label="difference from the baseline (%)",
        rows=tuple(row.name for row in rows),
        row_height=ROW_HEIGHT,
    )
    chart.line([(0.0, 0.0), (0.0, float(len(rows)))], "zero")
    for i, row in enumerate(rows):
        middle = len(rows) - i - 0.5
        for style, side, y in (
            ("author", row.author, middle + 0.18),
            ("reader", row.reader, middle - 0.18),
        ):
            if side.effect_pct is None:
                continue
            if side.ci_low_pct is not None and side.ci_high_pct is not None:
                chart.line([(side.ci_low_pct, y), (side.ci_high_pct, y)], style)
            word = verdict_word(side.verdict, row.metric, row.unit, None)
            chart.dot(side.effect_pct, y, style, tip=f"{style}: {side.effect_pct:+.2f} % ({word})")
    return chart


def replication_html(page: Replication) -> str:
    """Return the page in HTML. It loads nothing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markdown_it import MarkdownIt

    chart = _picture(page)
    left_out = len(page.rows) - MAX_DRAWN
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    pages = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    return (
        pages.get_template("replication.html.j2").render(
            page=page,
            head=render("\n".join(_head(page))),
            body=render("\n".join(_body(page))),
            picture="" if chart is None else chart_svg(chart),
            more=f"; the first {MAX_DRAWN} of {len(page.rows)} rows" if left_out > 0 else "",
        )
        + "\n"
    )


def write_replication(folder: Path, page: Replication) -> None:
    """Write ``replication.json``, ``replication.md`` and ``replication.html`` into a folder."""
    write_json(folder / FILE, page.to_json())
    write_text(folder / "replication.md", replication_markdown(page))
    write_text(folder / "replication.html", replication_html(page))


def replication_files(root: Path) -> list[Path]:
    """Return the files that readers sent back: ``*replication*.json`` below a folder, sorted."""
    levels = ("*/" * depth for depth in range(MAX_DEPTH + 1))
    found = {path for level in levels for path in root.glob(f"{level}*replication*.json")}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def holds_replications(folder: Path) -> bool:
    """Return whether a folder is neither a study nor a cell, but holds replications."""
    if not folder.is_dir() or is_cell(folder) or folder in study_dirs(folder):
        return False
    return bool(replication_files(folder))


def replications_markdown(root: Path) -> str:
    """Return a table of who replicated what, on which kind of machine.

    A file that cannot be read has a line with the reason.
    """
    lines: list[tuple[Path, Replication | str]] = []
    for path in replication_files(root):
        try:
            lines.append((path, Replication.read(path)))
        except RecordError as error:
            lines.append((path, str(error)))
    lines.sort(key=lambda line: (_study_of(line[1]), str(line[0])))
    text = markdown_table(_index(root, lines))
    count = count_text(len(lines), "replication")
    return f"# Replications in {root.resolve().name}\n\n{count}.\n\n{text}\n"


def _study_of(page: Replication | str) -> str:
    return page if isinstance(page, str) else page.author.study


def _index(
    root: Path, lines: Sequence[tuple[Path, Replication | str]]
) -> Table[tuple[Path, Replication | str]]:
    def column(heading: str, value: str) -> Column[tuple[Path, Replication | str]]:
        def text(line: tuple[Path, Replication | str]) -> str:
            page = line[1]
            return _cells(page)[value] if isinstance(page, Replication) else ""

        return Column(heading, text, numeric=False)

    words = [word.value for word in ReplicationWord]
    return Table(
        (
            Column("file", lambda line: line[0].relative_to(root).as_posix(), numeric=False),
            Column("study", lambda line: _first(line[1]), numeric=False),
            *(column(name, name) for name in ("author's machine", "machine", "date")),
            *(column(name, name) for name in ("versions", "question")),
            *(column(word, word) for word in words),
        ),
        tuple(lines),
    )


def _first(page: Replication | str) -> str:
    return f"cannot be read: {page}" if isinstance(page, str) else page.author.study


def _cells(page: Replication) -> dict[str, str]:
    counts = {word.value: str(page.counts.get(word.value, 0)) for word in ReplicationWord}
    return {
        "author's machine": page.author.machine_text,
        "machine": page.reader.machine_text,
        "date": page.reader.date,
        "versions": page.package_versions,
        "question": f"another: {', '.join(page.changes)}" if page.changes else "the same",
        **counts,
    }


def write_replications(root: Path) -> str:
    """Write ``replications.md`` and ``.html`` into a folder; return a line about them."""
    text = replications_markdown(root)
    write_text(root / "replications.md", text)
    write_text(root / "replications.html", html(text, max_width="90rem"))
    count = count_text(len(replication_files(root)), "replication")
    return f"{count}: {root / 'replications.md'} and {root / 'replications.html'}"
