"""The matrix of metrics: a row per metric or case, a column per arm, on the HTML page.

Each entry holds the arm's median, its difference from the baseline and the interval as a small bar.
The matrix is the page's overview. The tests behind it are in another table
(:mod:`labkit.analysis.tables.results_table`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from labkit.analysis.charts.html_interval_bars import IntervalScale
from labkit.analysis.document.report_parts import CellSource, Parts, section
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import join_names, percent_text, unit_name, value_text

SIGNS = {"equivalent": "=", "trivial": "≈", "inconclusive": "?", "estimate_only": ""}
UNDECIDED = ("inconclusive", "estimate_only")
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
    primary: bool
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
    arms = cell.real_arms
    return MetricMatrix(
        arms, [_group(cell, arms, name, members) for name, members in groups.items()],
        list(_notes(cell)),
    )  # fmt: skip


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


def _group(
    cell: Cell, arms: Sequence[str], name: str, members: Sequence[tuple[int, Row]]
) -> MatrixGroup:
    comparisons = [c for _, row in members for c in row.comparisons if c.arm in arms]
    scale = IntervalScale.of(comparisons, cell.design.margin_pct)
    failures = cell.failure_outcomes
    rows = [_row(arms, index, row, scale, failures) for index, row in members]
    return MatrixGroup(name, scale, rows)


def _row(
    arms: Sequence[str], index: int, row: Row, scale: IntervalScale, failures: Mapping[str, str]
) -> MatrixRow:
    by_arm = {c.arm: c for c in row.comparisons}
    requests = row.case == "all"
    definition = row.definition
    words = {c.verdict for arm, c in by_arm.items() if arm in arms}
    cells = [_cell(row, arm, by_arm.get(arm), scale, failures) for arm in arms]
    return MatrixRow(
        index,
        definition.short_label if requests else row.case,
        unit_name(row.unit) if requests else "",
        str(row.metric),
        row.primary,
        [] if row.skipped else cells,
        row.skipped,
        bool(words) and words <= set(UNDECIDED),
    )


def _cell(
    row: Row,
    arm: str,
    comparison: Comparison | None,
    scale: IntervalScale,
    failures: Mapping[str, str],
) -> MatrixCell:
    median = row.median(arm)
    value = failures.get(arm, value_text(None)) if median is None else value_text(median, row.unit)
    if comparison is None:
        return MatrixCell(value)
    verdict = comparison.verdict
    known = comparison.effect_pct is not None
    return MatrixCell(
        value,
        percent_text(comparison.effect_pct) if known else "",
        SIGNS.get(verdict, verdict),
        verdict,
        "" if verdict == "computed" else scale.bar_style(comparison),
    )


def _notes(cell: Cell) -> Iterator[str]:
    comparisons = [(row.case, c) for row in cell.rows for c in row.comparisons]
    words = {c.verdict for _, c in comparisons}
    estimated = {case: c.reason for case, c in comparisons if c.verdict == "estimate_only"}
    if estimated:
        some = len(estimated) < len({case for case, _ in comparisons})
        which = f" ({', '.join(estimated)})" if some else ""
        yield f"Estimates only{which}: {next(iter(estimated.values()))}."
    text = "Values are medians over runs"
    known = [c.ci_low_pct for row in cell.rows for c in row.comparisons]
    bars = "the differences, without intervals"
    if any(limit is not None for limit in known):
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
    used = [meaning for word, meaning in meanings.items() if word in words]
    if used:
        yield "; ".join(used) + "."


@section("All metrics")
def matrix_section(report: CellSource) -> Parts:
    """Show every metric of every arm."""
    return [_metric_matrix(report.cell)] if report.cell.rows else []
