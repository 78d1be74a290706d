"""The matrix of metrics: a row per metric or case, a column per arm, on the HTML page.

Each entry holds the arm's median, its difference from the baseline and the interval as a small bar.
The matrix is the page's overview. The tests behind it are in another table
(:mod:`labkit.analysis.tables.results_table`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from labkit.analysis.charts.html_interval_bars import IntervalScale
from labkit.analysis.document.report_parts import Section
from labkit.analysis.findings.cell_findings import UNDECIDED
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Row
from labkit.analysis.number_format import percent_text, unit_name, value_text
from labkit.analysis.text_format import join_names

SIGNS = {"equivalent": "=", "trivial": "≈", "inconclusive": "?", "estimate_only": ""}
FAMILIES = {
    "tok/s": "Throughput",
    "req/s": "Throughput",
    "s": "Throughput",
    "us": "Latency",
    "ms": "Latency",
    "bytes": "Memory",
    "% of RAM": "Memory",
}


@dataclass(frozen=True)
class MatrixCell:
    """What the matrix shows of one arm in one row."""

    # value, difference: the arm's median and its difference from the baseline as text.
    value: str
    difference: str = ""
    sign: str = ""  # the verdict as a word or a sign: ``better``, ``=``, ``≈``, ``?``
    kind: str = ""  # the verdict as in ``cell.json``, or empty
    bar: str = ""  # the properties of the interval's bar, or empty


@dataclass(frozen=True)
class MatrixRow:
    """A row: its index in ``cell.json``, name, unit, metric, and an entry for each arm.

    ``skipped`` is the reason why the row was not measured, or None. ``undecided``: whether no arm
    has a decided verdict.
    """

    index: int
    name: str
    unit: str
    metric: str
    cells: Sequence[MatrixCell]
    skipped: str | None
    undecided: bool


@dataclass(frozen=True)
class MatrixGroup:
    """Rows whose bars are drawn on the same scale."""

    name: str
    scale: IntervalScale
    rows: Sequence[MatrixRow]


@dataclass(frozen=True)
class MetricMatrix:
    """The whole matrix; HTML only."""

    arms: Sequence[str]
    groups: Sequence[MatrixGroup]
    notes: Sequence[str]
    kind: ClassVar[str] = "matrix"


def _metric_matrix(cell: Cell) -> MetricMatrix:
    """Return the matrix of a cell, the groups with primary rows first."""
    groups: dict[str, list[tuple[int, Row]]] = {}
    rows = sorted(enumerate(cell.rows), key=lambda item: not item[1].primary)
    cases = {row.case for _, row in rows}
    for index, row in rows:
        groups.setdefault(_group_name(row, len(cases) > 1), []).append((index, row))
    named = [_group(cell, name, members) for name, members in groups.items()]
    return MetricMatrix(cell.real_arms, named, list(_notes(cell)))


def _group_name(row: Row, several_cases: bool) -> str:
    """Return a row's group: its metric, or for the case ``all`` a family such as ``Memory``."""
    definition = row.definition
    if row.case != "all":
        if row.metric is None:
            return "Not measured"
        label = definition.label[:1].upper() + definition.label[1:]
        return f"{label} ({unit_name(row.unit)}), {row.better} is better"
    is_memory = "memory" in definition.words.quantity
    family = "Memory" if is_memory else FAMILIES.get(row.unit or "", "Work")
    return f"{family}, all requests" if several_cases else family


def _group(cell: Cell, name: str, members: Sequence[tuple[int, Row]]) -> MatrixGroup:
    arms, failures = cell.real_arms, cell.failure_outcomes
    comparisons = [c for _, row in members for c in row.comparisons if c.arm in arms]
    scale = IntervalScale.of(comparisons, cell.design.margin_pct)

    def entry(row: Row, arm: str) -> MatrixCell:
        median, one = row.median(arm), row.comparison(arm)
        value = value_text(median, row.unit)
        value = failures.get(arm, value) if median is None else value
        if one is None:
            return MatrixCell(value)
        difference = "" if one.effect_pct is None else percent_text(one.effect_pct)
        bar = "" if one.verdict == "computed" else scale.bar_style(one)
        sign = SIGNS.get(one.verdict, one.verdict)
        return MatrixCell(value, difference, sign, one.verdict, bar)

    def line(index: int, row: Row) -> MatrixRow:
        name, unit = row.case, ""
        if row.case == "all":
            name, unit = row.definition.short_label, unit_name(row.unit)
        words = {c.verdict for c in row.comparisons if c.arm in arms}
        cells = [] if row.skipped else [entry(row, arm) for arm in arms]
        undecided = bool(words) and words <= set(UNDECIDED)
        return MatrixRow(index, name, unit, str(row.metric), cells, row.skipped, undecided)

    return MatrixGroup(name, scale, [line(*member) for member in members])


def _notes(cell: Cell) -> Iterator[str]:
    comparisons = [(row.case, c) for row in cell.rows for c in row.comparisons]
    words = {c.verdict for _, c in comparisons}
    estimated = {case: c.reason for case, c in comparisons if c.verdict == "estimate_only"}
    if estimated:
        some = len(estimated) < len({case for case, _ in comparisons})
        which = f" ({', '.join(estimated)})" if some else ""
        yield f"Estimates only{which}: {next(iter(estimated.values()))}."
    text, bars = "Values are medians over runs", "the differences, without intervals"
    if any(c.ci_low_pct is not None for _, c in comparisons):
        bars = f"adjusted {join_names(cell.level_texts)} intervals"
    if words:
        text += (
            "; differences are estimated within blocks, so they may differ from the quotient of "
            f"two medians. Bars: {bars}, margin ±{cell.design.margin_pct:g} % shaded"
        )
    yield f"{text}."
    meanings = {
        "equivalent": "= no difference beyond the margin",
        "trivial": "≈ a difference inside the margin",
        "inconclusive": "? undecided",
    }
    if used := [meaning for word, meaning in meanings.items() if word in words]:
        yield "; ".join(used) + "."


matrix_section = Section(
    "All metrics", lambda report: [_metric_matrix(report.cell)] if report.cell.rows else []
)
