"""The table of results: one line per row and arm, with the baseline's value and the difference.

The columns are ``batch | kernel | baseline | arm | delta``, as in published tables of kernel times,
then the interval, the p-value, the verdict and the published difference. The table leaves out the
arms' own medians, because the delta is estimated within blocks and the quotient of two medians can
contradict it. The medians are in :func:`labkit.analysis.tables.results_table.medians_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.document.report_parts import table_section
from labkit.analysis.document.table_model import Column, Table, broken_name, if_known
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.analysis.findings.verdict_sentences import method_of, method_texts
from labkit.analysis.model.cell_model import Cell, PublishedRow
from labkit.analysis.model.result_row import Comparison, Row, row_name
from labkit.analysis.number_format import (
    UNKNOWN,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
    share_pct_text,
    significant_text,
    unit_name,
    value_text,
)
from labkit.analysis.tables.published_vs_measured import published_source
from labkit.records import Record

KERNEL_NAMES = {"decode": "per-token", "tiled": "tiled", "reference": "reference"}
MIN_WIDTH, MIN_WIDTH_SEVERAL_ARMS = 92, 110  # narrower terminals leave columns out
WIDTH_WITH_QUALITY = 140  # a terminal this wide also shows the intervals of quality
CACHE_STATES = {
    "hot": "hot caches: every launch follows one of the same arm on the same input",
    "warm": "warm caches: every turn follows a launch of another arm on the same input",
    "cold": "cold caches: more memory than they hold is read before every launch",
}
MEDIANS_TITLE = "Medians and quartiles"


@dataclass(frozen=True)
class ResultLine:
    """A line of the table: a row of the cell, an arm and its comparison with the baseline."""

    row_index: int  # the row's index in the cell
    row: Row
    arm: str | None  # the arm; None if the cell has no arm to compare

    @property
    def comparison(self) -> Comparison | None:
        return self.row.comparison(self.arm)

    @property
    def verdict(self) -> str | None:
        """The verdict's name in ``cell.json``, such as ``estimate_only``."""
        return None if self.comparison is None else self.comparison.verdict

    def compared(self, formatter: Callable[..., str], *keys: str) -> str:
        """Format the comparison's fields ``keys``; an empty string if there is no comparison."""
        if self.comparison is None or self.row.skipped is not None:
            return ""
        return formatter(*(getattr(self.comparison, key) for key in keys))


def _kernel_names(records: Sequence[Record]) -> dict[str, str]:
    """Return the kernel of each case by the case's name, if the records note kernels."""
    names: dict[str, str] = {}
    for record in records:
        for case in record.cases:
            kernel = case.known_notes.get("kernel")
            if kernel is not None:
                names.setdefault(case.case, KERNEL_NAMES.get(str(kernel), str(kernel)))
    return names


def results_table(
    cell: Cell, records: Sequence[Record], primary: bool = True, anchor: str = ""
) -> Table[ResultLine]:
    """Return the results of a cell's primary rows, or (``primary=False``) of all others.

    ``anchor`` is the cell's prefix on the HTML page: numbers link to the runs behind them.
    """
    indexed = [(i, row) for i, row in enumerate(cell.rows) if row.primary is primary]
    rows, arms, kernels = [row for _, row in indexed], cell.compared_arms, _kernel_names(records)
    published = _published_rows(cell, rows, arms)
    units = {row.unit for row in rows if row.metric is not None}
    unit = f" ({unit_name(units.pop())})" if len(units) == 1 else ""

    def link(line: ResultLine) -> str:
        return f"#{anchor}r{line.row_index}"

    word = "case" if cell.design.imported else "batch"
    columns = [_row_column(rows, unit, word)]
    if kernels:
        columns.append(_kernel_column(kernels, len(arms) > 1))
    if arms:
        columns += _arm_columns(cell, arms, unit, link)
    else:
        columns.append(_baseline_only_column(cell, unit, link))
    if published and arms:
        columns.append(_published_column(published))
    shown: list[str | None] = [*arms] or [None]
    lines = [ResultLine(i, row, arm) for i, row in indexed for arm in shown]
    notes = [*_notes(cell, bool(published)), *_cache_notes(records)]
    return Table(tuple(columns), tuple(lines), tuple(notes), is_results=True)


def _row_column(rows: Sequence[Row], unit: str, word: str) -> Column[ResultLine]:
    """Return the column that names rows: by case (``word``), by metric, or by both."""
    requests = all(row.case == "all" for row in rows)
    several_metrics = len({row.metric for row in rows if row.metric}) > 1

    def name(line: ResultLine) -> str:
        row = line.row
        text = str(row.metric if requests and row.metric else row.case)
        if not requests and several_metrics and row.metric:
            text += f": {row.metric}"
        return f"{text} ({unit_name(row.unit)})" if row.unit == "bytes" and not unit else text

    return Column("metric" if requests else word, name, numeric=False, once_per_row=True)


def _kernel_column(kernels: Mapping[str, str], several_arms: bool) -> Column[ResultLine]:
    return Column(
        "kernel",
        lambda line: kernels.get(line.row.case, ""),
        numeric=False,
        min_width=MIN_WIDTH_SEVERAL_ARMS if several_arms else MIN_WIDTH,
        once_per_row=True,
    )


def _baseline_only_column(
    cell: Cell, unit: str, link: Callable[[ResultLine], str]
) -> Column[ResultLine]:
    baseline = cell.baseline

    def value(line: ResultLine) -> str:
        row = line.row
        return row.skipped or value_text(row.arms[baseline].median, row.unit)

    return Column(f"{baseline}{unit}", value, once_per_row=True, link=link)


def _arm_columns(
    cell: Cell, arms: Sequence[str], unit: str, link: Callable[[ResultLine], str]
) -> Iterator[Column[ResultLine]]:
    baseline, level, failures = cell.baseline, cell.level_texts[0], cell.failure_outcomes

    def baseline_median(line: ResultLine) -> str:
        if line.row.skipped is not None:
            return ""
        median = line.row.median(baseline)
        known = value_text(median, line.row.unit)
        return failures.get(baseline, known) if median is None else known

    def delta(line: ResultLine) -> str:
        if line.row.skipped is not None:
            return ""
        if line.row.median(line.arm) is None:
            return failures.get(str(line.arm), UNKNOWN)
        return line.compared(percent_text, "effect_pct") or UNKNOWN

    def interval(line: ResultLine) -> str:
        text = line.compared(interval_text, "ci_low_pct", "ci_high_pct")
        own = line.compared(str, "level_text")
        return text if text == UNKNOWN or own in ("", level) else f"{text} ({own})"

    def verdict(line: ResultLine) -> str:
        if line.row.skipped is not None:
            return f"skipped: {line.row.skipped}"
        return "" if line.verdict is None else verdict_word(line.row, line.verdict)

    if len(arms) > 1:
        yield Column("arm", lambda line: line.arm, numeric=False)
    yield Column(f"{baseline}{unit}", baseline_median, once_per_row=True, link=link)
    heading = "delta" if len(arms) > 1 else f"delta of {arms[0]}"
    short = "delta\n%" if len(arms) > 1 else f"delta of\n{broken_name(arms[0])}\n%"
    yield Column(heading, delta, short_heading=short, link=link)
    short = f"adjusted\n{level} CI, %"
    yield Column(f"adjusted {level} CI (%)", interval, short_heading=short, link=link)
    yield Column(
        "adjusted p",
        lambda line: line.compared(p_text, "p_adjusted"),
        short_heading="adjusted\np",
        min_width=MIN_WIDTH,
        link=link,
    )
    yield from _quality_columns(cell)
    yield Column("verdict", verdict, numeric=False, is_verdict=True)


def _quality_columns(cell: Cell) -> Iterator[Column[ResultLine]]:
    qualities, level = cell.qualities, f"{100 * cell.design.quality_confidence:.3g} %"
    forms: Mapping[str, Callable[[float], str]] = {
        "kl_mean": lambda value: significant_text(value, 3),
        "top1_agreement": lambda value: share_pct_text(value, 2),
    }

    def column(heading: str, metric: str, *keys: str, **options: Any) -> Column[ResultLine]:
        def text(line: ResultLine) -> str:
            quality = qualities.get(line.arm or "")
            known = None if quality is None else quality.metrics.get(metric)
            ends = (getattr(known, key, None) for key in keys)
            return " to ".join(forms[metric](end) for end in ends if end is not None)

        return Column(heading, text, **options)

    if qualities:
        wide = {"min_width": WIDTH_WITH_QUALITY}
        yield column("KL (nats)", "kl_mean", "estimate", short_heading="KL\nnats")
        yield column(f"KL {level} CI", "kl_mean", "low", "high", **wide)
        top1, short = "top1_agreement", f"same next\n{level} CI, %"
        yield column("same next token (%)", top1, "estimate", short_heading="same\nnext\n%")
        heading = f"same next token {level} CI (%)"
        yield column(heading, top1, "low", "high", short_heading=short, **wide)


def _published_rows(
    cell: Cell, rows: Sequence[Row], arms: Sequence[str]
) -> dict[tuple[str, str | None], PublishedRow]:
    measured = {(row.case, row.metric) for row in rows}
    return {
        (row.case, row.metric): row
        for row in cell.published_rows
        if (row.case, row.metric) in measured
        and any(arm in numbers for numbers in (row.delta_pct, row.p) for arm in arms)
    }


def _published_column(
    published: Mapping[tuple[str, str | None], PublishedRow],
) -> Column[ResultLine]:
    def value(line: ResultLine) -> str:
        row = published.get((line.row.case, line.row.metric))
        if row is None:
            return ""
        delta, p, wins = (each.get(line.arm or "") for each in (row.delta_pct, row.p, row.wins))
        text = percent_text(float(delta)) if delta is not None else ""
        evidence = [f"p = {p}"] * (p is not None) + [f"{wins} wins"] * (wins is not None)
        return f"{text} ({', '.join(evidence)})" if evidence else text

    return Column("published", value, short_heading="publ.\n%", min_width=MIN_WIDTH)


def _notes(cell: Cell, has_published: bool) -> list[str]:
    source = published_source(cell) if has_published else None
    notes, arms = [source] if source else [], cell.compared_arms
    of_arms = [c for row in cell.primary_rows for c in row.comparisons if c.arm in arms]
    smallest_p_values = [c.p_floor for c in of_arms if c.p_floor]
    if smallest_p_values:
        texts = method_texts(cell, "all {} relabellings")
        used = {method_of(texts, c) for c in of_arms if c.p_floor}
        # Of exact tests, the largest number: rows that a look decided have fewer relabellings.
        kinds = {text.split()[0]: text for text in texts.values() if text in used}
        method = " or ".join(kinds.values())
        own = " but estimates, whose intervals are their own,"
        rows = f"rows{own if cell.design.estimates else ''}"
        earlier = ", at its own level where an earlier look decided the row"
        earlier = earlier if len(cell.level_texts) > 1 else ""
        notes.append(
            f"Interval and p: one permutation test within blocks ({method}), "
            f"adjusted over all {rows} and arms{earlier}; smallest reachable p "
            f"{p_text(min(smallest_p_values))}. Delta: the difference from the baseline, estimated "
            "within blocks (Hodges-Lehmann), above 0 where the metric is larger; each arm's own "
            f'median is in the report under "{MEDIANS_TITLE}".'
        )
    if cell.quality:
        first = cell.quality[0]
        notes.append(
            f"KL divergence (mean) and same next token: compared with {first.arm}, over "
            f"{first.windows:,} windows of text ({first.tokens:,} predicted tokens); "
            "intervals over windows (block jackknife)."
        )
    return notes


def _cache_notes(records: Sequence[Record]) -> list[str]:
    states = {case.known_notes.get("state") for record in records for case in record.cases}
    texts = [text for state, text in CACHE_STATES.items() if state in states]
    return [f"Timed on {'; '.join(texts)}."] if texts else []


def medians_table(cell: Cell) -> Table[ResultLine]:
    """Return every arm's own median and quartiles in every row. Primary rows come first."""
    rows = sorted(enumerate(cell.rows), key=lambda item: not item[1].primary)
    lines = [ResultLine(i, r, arm) for i, r in rows if r.skipped is None for arm in r.arms]
    metrics = {line.row.metric for line in lines if line.row.case != "all"}

    def quantile(key: str) -> Callable[[ResultLine], str]:
        return lambda line: value_text(getattr(line.row.arms[str(line.arm)], key), line.row.unit)

    mde_text = if_known(lambda mde_pct: f"{magnitude_text(mde_pct)}%")
    columns: tuple[Column[ResultLine], ...] = (
        Column("row", lambda line: row_name(line.row, metrics), numeric=False),
        Column("arm", lambda line: line.arm, numeric=False),
        Column("unit", lambda line: unit_name(line.row.unit), numeric=False),
        *(Column(key, quantile(key)) for key in ("median", "q1", "q3")),
        Column("runs", lambda line: line.row.arms[str(line.arm)].n),
        Column("blocks won", lambda line: line.compared(_wins_text, "wins", "blocks")),
        Column("detectable effect", lambda line: line.compared(mde_text, "mde_pct")),
    )
    return Table(columns, tuple(lines))


def _wins_text(wins: int | None, blocks: int) -> str:
    return "" if wins is None else f"{wins} of {blocks}"


medians_section = table_section(MEDIANS_TITLE, lambda cell, records: medians_table(cell))
