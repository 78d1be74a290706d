"""What others published of a cell, and ours of the same rows below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.analysis.number_format import percent_text, unit_name, value_text
from labkit.analysis.output_identity import OutputAgreement
from labkit.analysis.rendering.tables import Column, Table, host_times
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record, counter_registry

Json = Mapping[str, Any]


def published_source(cell: Json) -> str | None:
    """Say whose numbers stand in the published column."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return None
    ours = f"; ours: scale={cell['scale']}" if cell.get("scale") else ""
    return (
        f"published: {published.get('machine', 'machine not stated')}; "
        f"{published.get('source', 'source not stated')}. Theirs, never mixed with ours{ours}."
    )


@dataclass(frozen=True)
class Beside:
    """A line of the published numbers: theirs, or below them ours of the same row.

    ``own``: our row of that case and metric; None where the line is theirs.
    """

    row: Json
    own: Json | None = None

    def number(self, arm: str) -> str:
        """Write an arm's number; nothing where there is none."""
        if self.own is None:
            numbers = self.row.get("arms") or {}
            return f"{numbers[arm]:,}" if arm in numbers else ""
        middle = (self.own["arms"].get(arm) or {}).get("median")
        return "" if middle is None else value_text(middle, self.own["unit"])

    def delta(self, arm: str) -> str:
        """Write an arm's difference from the baseline; nothing where there is none."""
        if self.own is None:
            numbers = self.row.get("delta_pct") or {}
            return percent_text(numbers[arm]) if arm in numbers else ""
        found = next((c for c in self.own["comparisons"] if c["arm"] == arm), None)
        return "" if found is None else percent_text(found["effect_pct"])


def published_table(cell: Json, more: Sequence[Json] = ()) -> Table[Beside] | None:
    """Lay out the published numbers as they were published, and ours of the same row below them.

    Of cases that this cell has; None where no arm's number was published. ``more``: what of ours
    may stand beside published numbers besides the rows of the cell: rows of the same form.
    """
    published, cases = cell["published"], {row["case"] for row in cell["rows"]}
    given = published.get("rows") or [] if isinstance(published, Mapping) else []
    rows = [row for row in given if row["case"] in cases]
    theirs = dict.fromkeys(arm for row in rows for arm in row.get("arms") or {})
    if not theirs:
        return None
    every = [*counter_rows(cell), *more, *cell["rows"]]
    ours = {(row["case"], row["metric"]): row for row in every if row["metric"] is not None}
    lines = []
    for row in rows:
        own = ours.get((row["case"], row.get("metric", published.get("metric"))))
        lines += [Beside(row)] if own is None else [Beside(row), Beside(row, own)]
    several = {(row.get("metric"), row.get("unit")) for row in rows} != {(None, None)}

    def name(line: Beside) -> str:
        metric, unit = (line.row.get(k, published.get(k)) for k in ("metric", "unit"))
        if line.own is not None:
            return f"here ({unit_name(line.own['unit'])})" if line.own["unit"] != unit else "here"
        return f"{line.row['case']}: {metric} ({unit_name(unit)})" if several else line.row["case"]

    unit = "" if several else f" ({unit_name(published.get('unit'))})"
    arms = dict.fromkeys([*theirs, *real_arms(cell)])
    deltas = dict.fromkeys(arm for row in rows for arm in row.get("delta_pct") or {})
    columns = [Column[Beside]("published, and here", name, number=False)]
    columns += [Column(f"{arm}{unit}", _asked(Beside.number, arm)) for arm in arms]
    for arm in deltas:
        heading = "delta" if len(deltas) == 1 else f"delta, {arm}"
        columns.append(Column(heading, _asked(Beside.delta, arm)))
    shown = [c for c in columns if any(map(c.text, lines))]
    return Table(tuple(shown), tuple(lines), (published_source(cell) or "",))


def _asked(ask: Callable[[Beside, str], str], arm: str) -> Callable[[Beside], str]:
    return lambda line: ask(line, arm)


def published_tables(cell: Json) -> Iterator[tuple[str, Table[Sequence[Any]]]]:
    """Yield the tables that were published as tables, with their titles, word for word."""
    published = cell["published"]
    given = published.get("tables") or [] if isinstance(published, Mapping) else []
    for table in given:
        columns = tuple(
            Column[Sequence[Any]](str(heading), _at(place), number=place > 0)
            for place, heading in enumerate(table["columns"])
        )
        notes = (*map(str, table.get("notes") or ()), published_source(cell) or "")
        yield str(table["title"]), Table(columns, tuple(table["rows"]), notes)


def _at(place: int) -> Callable[[Sequence[Any]], str]:
    return lambda row: str(row[place]) if place < len(row) else ""


AGREEMENT_METRICS = ("agreeing_prefix", "differing_requests")  # what is published of outputs


def agreement_rows(found: Sequence[OutputAgreement]) -> list[Json]:
    """Return how far outputs agree as rows with the two :data:`AGREEMENT_METRICS`."""
    shares = {a.arm: {"median": a.prefix} for a in found}
    misses = {a.arm: {"median": float(a.total - a.agree)} for a in found}
    units = ("share", "requests")
    return [
        _row("all", metric, unit, arms)
        for metric, unit, arms in zip(AGREEMENT_METRICS, units, (shares, misses), strict=True)
    ]


def counter_rows(cell: Json) -> Iterator[Json]:
    """Yield what the engines counted, as rows of a cell: the counter's name is the metric."""
    counted = {arm["name"]: arm["counters"] for arm in cell["arms"]}
    for name in dict.fromkeys(name for found in counted.values() for name in found):
        known = counter_registry.find_counter(name)
        if known is not None:
            arms = {arm: {"median": found[name]} for arm, found in counted.items() if name in found}
            yield _row("all", name, known.unit, arms)


def host_rows(records: Sequence[Record]) -> Iterator[Json]:
    """Yield the host's time of a step's maps and of its whole plan, as rows of a cell (us)."""
    for (case, name), arms in host_times(records).items():
        yield _row(case, name, "us", {arm: {"median": median(t)} for arm, t in arms.items()})


def _row(case: str, metric: str, unit: str, arms: Json) -> Json:
    return {"case": case, "metric": metric, "unit": unit, "arms": arms, "comparisons": ()}
