"""Tables of a cell's published numbers; below each line are our own numbers of the same row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.analysis.charts.published_chart import (
    CAPTION,
    published_chart,
    published_stem,
)
from labkit.analysis.comparison.output_identity import OutputAgreement
from labkit.analysis.document.report_parts import (
    ChartPart,
    Part,
    PictureFile,
    Prose,
    TablePart,
    section,
    table_parts,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.verdict_sentences import real_arms
from labkit.analysis.number_format import percent_text, unit_name, value_text
from labkit.analysis.tables.host_times_table import host_times
from labkit.records import Record, counter_registry

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

Json = Mapping[str, Any]
AGREEMENT_METRICS = ("agreeing_prefix", "differing_requests")  # names that articles use


def published_source(cell: Json) -> str | None:
    """Return a line with the machine and the source of the published numbers, or None."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return None
    scale = f", which were run with scale={cell['scale']}" if cell.get("scale") else ""
    return (
        f"published: {published.get('machine', 'machine not stated')}; "
        f"{published.get('source', 'source not stated')}. "
        f"These numbers are never mixed with ours{scale}."
    )


@dataclass(frozen=True)
class PublishedLine:
    """A line of published numbers, or the line below it with our numbers of the same row.

    Parameters
    ----------
    published_row
        The published row.
    own_row
        Our row of the same case and metric. None if the line shows the published numbers.
    """

    published_row: Json
    own_row: Json | None = None

    def number(self, arm: str) -> str:
        """Return an arm's number as text, or an empty string if the arm has none."""
        if self.own_row is None:
            numbers = self.published_row.get("arms") or {}
            return f"{numbers[arm]:,}" if arm in numbers else ""
        own_median = (self.own_row["arms"].get(arm) or {}).get("median")
        return "" if own_median is None else value_text(own_median, self.own_row["unit"])

    def delta(self, arm: str) -> str:
        """Return an arm's difference from the baseline as text, or an empty string if unknown."""
        if self.own_row is None:
            deltas = self.published_row.get("delta_pct") or {}
            return percent_text(deltas[arm]) if arm in deltas else ""
        comparison = next((c for c in self.own_row["comparisons"] if c["arm"] == arm), None)
        return "" if comparison is None else percent_text(comparison["effect_pct"])


def published_table(cell: Json, extra_rows: Sequence[Json] = ()) -> Table[PublishedLine] | None:
    """Return the published numbers of this cell's cases, each line followed by our numbers.

    ``extra_rows``: own rows in addition to the cell's, in the same form. None if no number of any
    arm was published.
    """
    published, cases = cell["published"], {row["case"] for row in cell["rows"]}
    all_rows = published.get("rows") or [] if isinstance(published, Mapping) else []
    rows = [row for row in all_rows if row["case"] in cases]
    published_arms = dict.fromkeys(arm for row in rows for arm in row.get("arms") or {})
    if not published_arms:
        return None
    candidates = [*counter_rows(cell), *extra_rows, *cell["rows"]]
    own_rows = {
        (row["case"], row["metric"]): row for row in candidates if row["metric"] is not None
    }
    lines = []
    for row in rows:
        own_row = own_rows.get((row["case"], row.get("metric", published.get("metric"))))
        lines.append(PublishedLine(row))
        if own_row is not None:
            lines.append(PublishedLine(row, own_row))
    several_metrics = {(row.get("metric"), row.get("unit")) for row in rows} != {(None, None)}

    def name(line: PublishedLine) -> str:
        row, own_row = line.published_row, line.own_row
        metric, unit = (row.get(key, published.get(key)) for key in ("metric", "unit"))
        if own_row is not None:
            return f"here ({unit_name(own_row['unit'])})" if own_row["unit"] != unit else "here"
        return f"{row['case']}: {metric} ({unit_name(unit)})" if several_metrics else row["case"]

    unit = "" if several_metrics else f" ({unit_name(published.get('unit'))})"
    arms = dict.fromkeys([*published_arms, *real_arms(cell)])
    delta_arms = dict.fromkeys(arm for row in rows for arm in row.get("delta_pct") or {})
    columns = [Column[PublishedLine]("published, and here", name, numeric=False)]
    columns += [Column(f"{arm}{unit}", _for_arm(PublishedLine.number, arm)) for arm in arms]
    for arm in delta_arms:
        heading = "delta" if len(delta_arms) == 1 else f"delta, {arm}"
        columns.append(Column(heading, _for_arm(PublishedLine.delta, arm)))
    shown = [column for column in columns if any(map(column.text, lines))]
    return Table(tuple(shown), tuple(lines), (published_source(cell) or "",))


def _for_arm(
    method: Callable[[PublishedLine, str], str], arm: str
) -> Callable[[PublishedLine], str]:
    return lambda line: method(line, arm)


def published_tables(cell: Json) -> Iterator[tuple[str, Table[Sequence[Any]]]]:
    """Yield the title and content of each published table that is reproduced word for word."""
    published = cell["published"]
    tables = published.get("tables") or [] if isinstance(published, Mapping) else []
    for table in tables:
        columns = tuple(
            Column[Sequence[Any]](str(heading), _cell_at(index), numeric=index > 0)
            for index, heading in enumerate(table["columns"])
        )
        notes = (*map(str, table.get("notes") or ()), published_source(cell) or "")
        yield str(table["title"]), Table(columns, tuple(table["rows"]), notes)


def _cell_at(index: int) -> Callable[[Sequence[Any]], str]:
    return lambda row: str(row[index]) if index < len(row) else ""


def agreement_rows(agreements: Sequence[OutputAgreement]) -> list[Json]:
    """Return the agreement of outputs in the form of a cell's rows.

    There is one row for each of ``AGREEMENT_METRICS``.
    """
    prefixes = {a.arm: {"median": a.prefix} for a in agreements}
    differing = {a.arm: {"median": float(a.total - a.agree)} for a in agreements}
    units = ("share", "requests")
    return [
        _row("all", metric, unit, arms)
        for metric, unit, arms in zip(AGREEMENT_METRICS, units, (prefixes, differing), strict=True)
    ]


def counter_rows(cell: Json) -> Iterator[Json]:
    """Yield the engines' counters in the form of a cell's rows, with their names as metrics."""
    counters = {arm["name"]: arm["counters"] for arm in cell["arms"]}
    for name in dict.fromkeys(name for by_name in counters.values() for name in by_name):
        counter = counter_registry.find_counter(name)
        if counter is not None:
            arms = {
                arm: {"median": by_name[name]}
                for arm, by_name in counters.items()
                if name in by_name
            }
            yield _row("all", name, counter.unit, arms)


def host_time_rows(records: Sequence[Record]) -> Iterator[Json]:
    """Yield the host times (us) of a step's maps and whole plan in the form of a cell's rows."""
    for (case, name), arms in host_times(records).items():
        yield _row(case, name, "us", {arm: {"median": median(t)} for arm, t in arms.items()})


def _row(case: str, metric: str, unit: str, arms: Json) -> Json:
    return {"case": case, "metric": metric, "unit": unit, "arms": arms, "comparisons": ()}


@section("Published by others")
def published_section(report: CellReport) -> Iterator[Part]:
    """Show published numbers beside ours."""
    agreement = agreement_rows(report.analysis.identity.agreement)
    extra_rows = [*agreement, *host_time_rows(report.records)]
    chart = published_chart(report.cell)
    if chart is not None:
        yield ChartPart(chart, CAPTION)
        yield PictureFile(published_stem(report.cell), CAPTION)
    yield from table_parts(published_table(report.cell, extra_rows))
    for title, table in published_tables(report.cell):
        yield Prose([f"{title}:"])
        yield TablePart(table)
