"""Tables: columns declared once, each with heading, value and format, and lines of any type.

Beside that the tables of a cell that are no results: what others published, the host's time,
how far outputs agree, spread, second analyses, failed runs; and the cells of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from labkit.analysis.formatting import (
    interval_text,
    p_text,
    percent_text,
    unit_name,
    value_text,
)
from labkit.analysis.same_outputs import Agreement, IdentityReport
from labkit.analysis.sensitivity import Second
from labkit.analysis.sentences import real_arms, row_name
from labkit.records import Record

T = TypeVar("T")
Json = Mapping[str, Any]
SECONDS = "Of each row alone, not adjusted. The verdicts above do not use these numbers."


def said(value: Any) -> str:
    """Write what needs no format; what is not known stays empty."""
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of lines of type ``T``: its heading, its value and how that is written.

    Parameters
    ----------
    heading, value, form
        What stands above, what a line has there, and the value as text.
    number
        Whether it holds numbers: set right, sorted as such.
    short
        The heading where there is little room; None: the heading, broken at its joints.
    least_width
        A terminal with fewer characters does without.
    once
        Whether all lines of a row have the same there.
    verdict
        Whether it holds a verdict: coloured, and shortened to its word.
    link
        Where a line's cell leads on the page.
    """

    heading: str
    value: Callable[[T], Any]
    form: Callable[[Any], str] = said
    number: bool = True
    short: str | None = None
    least_width: int = 0
    once: bool = False
    verdict: bool = False
    link: Callable[[T], str] | None = None

    def text(self, line: T) -> str:
        """Return a line's cell."""
        return self.form(self.value(line))


@dataclass(frozen=True)
class Table(Generic[T]):
    """Columns, lines and notes below (the source of published numbers, units).

    ``wide``: a table of results, whose lines are :class:`.results.Result`. ``prose``: its cells are
    phrases, which may be broken.
    """

    columns: tuple[Column[T], ...]
    lines: tuple[T, ...]
    notes: tuple[str, ...] = ()
    wide: bool = False
    prose: bool = False

    def cells(self, line: T) -> list[str]:
        """Return a line's cells as text."""
        return [column.text(line) for column in self.columns]


def published_line(cell: Json) -> str | None:
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


def published_table(cell: Json, agreement: Sequence[Agreement] = ()) -> Table[Beside] | None:
    """Lay out the published numbers as they were published, and ours of the same row below them.

    Of cases that this cell has; None where no arm's number was published. ``agreement``: of our
    outputs, beside which published ones may stand.
    """
    published, cases = cell["published"], {row["case"] for row in cell["rows"]}
    given = published.get("rows") or [] if isinstance(published, Mapping) else []
    rows = [row for row in given if row["case"] in cases]
    theirs = dict.fromkeys(arm for row in rows for arm in row.get("arms") or {})
    if not theirs:
        return None
    every = [*cell["rows"], *agreement_rows(agreement)]
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
    return Table(tuple(shown), tuple(lines), (published_line(cell) or "",))


def _asked(ask: Callable[[Beside, str], str], arm: str) -> Callable[[Beside], str]:
    return lambda line: ask(line, arm)


AGREEMENT = ("agreeing_prefix", "differing_requests")  # what is published of outputs


def agreement_rows(found: Sequence[Agreement]) -> list[Json]:
    """Return how far outputs agree, as rows of a cell: the two metrics of :data:`AGREEMENT`."""
    shares = {a.arm: {"median": a.prefix} for a in found}
    misses = {a.arm: {"median": float(a.total - a.agree)} for a in found}
    return [
        {"case": "all", "metric": metric, "unit": unit, "arms": arms, "comparisons": []}
        for metric, unit, arms in zip(
            AGREEMENT, ("share", "requests"), (shares, misses), strict=True
        )
    ]


def host_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Lay out the host's time to build the maps of a step, median per arm (us), if noted.

    Records that note what the whole plan of a step takes have a column for that, too.
    """
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for record in records:
        for case in record.cases:
            for name in ("map_us", "plan_us"):
                if isinstance(case.notes.get(name), int | float):
                    times = found.setdefault(case.case, {}).setdefault((record.arm, name), [])
                    times.append(float(case.notes[name]))
    if not found:
        return None

    def middle(arm: str, name: str) -> Callable[[str], str]:
        key = (arm, name)
        return lambda case: value_text(median(found[case][key])) if key in found[case] else ""

    planned = any(name == "plan_us" for times in found.values() for _, name in times)
    words = {"map_us": " maps", "plan_us": " plan"} if planned else {"map_us": ""}
    columns = [Column[str]("batch", said, number=False)]
    columns += [
        Column(f"{arm['name']}{word} (µs)", middle(arm["name"], name))
        for arm in cell["arms"]
        for name, word in words.items()
    ]
    notes = ["Once per step, before the first dispatch; not part of the dispatch times above."]
    if planned:
        notes.append(
            "Plan: all that the layers of a step share, its maps included: the batch is checked, "
            "its lengths, slots and tables are derived, and what a device reads is put there."
        )
    return Table(tuple(columns), tuple(found), tuple(notes))


def output_unit(cell: Json) -> str:
    """Name what agreement is counted in: requests, or token rows of kernel cases."""
    return "requests" if all(row["case"] == "all" for row in cell["rows"]) else "token rows"


def agreement_table(report: IdentityReport, unit: str) -> Table[Agreement] | None:
    """Lay out how much of every arm's outputs agrees with the reference run's.

    ``unit``: what is counted, in the plural. None where nothing was compared.
    """
    found = [a for a in report.agreement if a.total]
    if not found:
        return None

    def first(a: Agreement) -> str:
        differs = report.first(a.arm)
        return "none" if differs is None else f"{differs.case}: {differs.where}; {differs.run}"

    columns: tuple[Column[Agreement], ...] = (
        Column("arm", lambda a: a.arm, number=False),
        Column(f"{unit} that agree in every run", lambda a: f"{a.agree:,} of {a.total:,}"),
        Column("agreeing prefix", lambda a: a.prefix, "{:.1%}".format),
        Column("first difference", first, number=False),
    )
    return Table(columns, tuple(found), (f"Compared with run {report.reference}.",))


@dataclass(frozen=True)
class Spread:
    """One arm in one primary row: its summary, and its comparison (empty: the baseline's)."""

    row: Json
    arm: str
    values: Json
    found: Json


def spread_table(cell: Json) -> Table[Spread]:
    """Lay out every arm's median, quartiles, smallest visible effect and pairwise wins."""
    lines = [
        Spread(row, arm, values, by_arm.get(arm, {}))
        for row in cell["rows"]
        if row["skipped"] is None and row["primary"]
        for by_arm in [{c["arm"]: c for c in row["comparisons"]}]
        for arm, values in row["arms"].items()
    ]

    def quantile(key: str) -> Callable[[Spread], str]:
        return lambda line: value_text(line.values[key], line.row["unit"])

    def wins(line: Spread) -> str | None:
        won = line.found.get("wins")
        return None if won is None else f"{won} of {line.found['blocks']}"

    columns: tuple[Column[Spread], ...] = (
        Column("row", lambda line: row_name(line.row), number=False),
        Column("arm", lambda line: line.arm, number=False),
        *(Column(key, quantile(key)) for key in ("median", "q1", "q3")),
        Column("runs", lambda line: line.values["n"]),
        Column("wins", wins),
        Column(
            "sees at best",
            lambda line: line.found.get("mde_pct"),
            lambda pct: "" if pct is None else f"{pct:.1f}%",
        ),
    )
    return Table(columns, tuple(lines))


def seconds_table(cell: Json, found: Sequence[Second]) -> Table[Second]:
    """Lay out the second analyses of rows and arms."""
    columns: tuple[Column[Second], ...] = (
        Column("row", lambda s: row_name(cell["rows"][s.row]), number=False),
        Column("arm", lambda s: s.arm, number=False),
        Column("analysis", lambda s: s.how, number=False),
        Column("delta", lambda s: s.effect_pct, percent_text),
        Column("CI alone (%)", lambda s: s.ci_pct or (None, None), lambda ci: interval_text(*ci)),
        Column("p alone", lambda s: s.p, p_text),
        Column("blocks", lambda s: s.blocks),
    )
    return Table(columns, tuple(found), (SECONDS,), prose=True)


def failures_table(cell: Json, folder: str = "") -> Table[Json]:
    """Lay out the failed runs, with links to their records."""

    def record(failure: Json) -> str:
        return f"{folder}runs/{failure['run']}.json"

    columns: tuple[Column[Json], ...] = (
        Column("run", lambda failure: failure["run"], number=False, link=record),
        Column("outcome", lambda failure: failure["outcome"], number=False),
        Column("detail", lambda failure: failure["detail"], str, number=False),
    )
    return Table(columns, tuple(cell["failures"]))


def cells_table(study: Json) -> Table[tuple[int, Json]]:
    """Lay out the cells of a study, by number, with their answers."""
    columns: tuple[Column[tuple[int, Json]], ...] = (
        Column("cell", lambda c: c[1]["cell"], number=False, link=lambda c: f"#cell{c[0]}"),
        Column("answer", lambda c: c[1]["answer"], number=False),
        Column("gates", lambda c: c[1]["gates"], gates_text, number=False),
    )
    return Table(columns, tuple(enumerate(study["cells"])), prose=True)


def gates_text(gates: Mapping[str, str]) -> str:
    """Write the gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {status}" for name, status in gates.items())
