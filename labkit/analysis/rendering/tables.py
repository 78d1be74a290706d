"""The tables of a report: columns declared once, each with heading, value and format.

The main one is the article's: ``batch | kernel | baseline | arm | delta``, extended by
interval, p, verdict and the published delta. Several arms: one line per arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from labkit.analysis.identity import Agreement, IdentityReport
from labkit.analysis.sensitivity import Second
from labkit.analysis.sentences import control_name, level_text, relabelled, row_name
from labkit.records import Record, parse_run_name

T = TypeVar("T")
Json = Mapping[str, Any]
KERNELS = {"decode": "per-token", "tiled": "tiled", "reference": "reference"}
SECONDS = "Of each row alone, not adjusted. The verdicts above do not use these numbers."
WIDE, WIDER = 92, 110  # characters of a terminal below which a column is left out


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

    ``wide``: a table of results, whose lines are :class:`Result`. ``prose``: its cells are
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


@dataclass(frozen=True)
class Result:
    """A line of a table of results: a row of the cell, an arm and its comparison.

    ``index``: the row's place in the cell. ``several``: whether the row has more lines.
    """

    index: int
    row: Json
    arm: str | None
    found: Json | None
    several: bool

    @property
    def verdict(self) -> str | None:
        """The verdict's word."""
        return None if self.found is None else str(self.found["verdict"])

    @property
    def brief(self) -> str:
        """The verdict as it stands beside the row's name where there is no room for columns."""
        if self.verdict is not None:
            word = verdict_text(self.verdict)
        else:
            word = "skipped" if self.arm is not None and self.row["skipped"] is not None else ""
        return f"{self.arm}: {word}" if word and self.several else word

    @property
    def comparison(self) -> Json | None:
        """The arm against the baseline; None where nothing was compared."""
        return self.found if self.row["skipped"] is None else None


def _compared(form: Callable[..., str], *keys: str) -> Callable[[Result], str]:
    """Return a column's value: numbers of the comparison, written; nothing without one."""

    def value(line: Result) -> str:
        found = line.comparison
        return "" if found is None else form(*(found[key] for key in keys))

    return value


def kernels(records: Sequence[Record]) -> dict[str, str]:
    """Name the kernel that ran each case, where the records say it."""
    found: dict[str, str] = {}
    for record in records:
        for case in record.cases:
            kernel = case.notes.get("kernel")
            if kernel is not None:
                found.setdefault(case.case, KERNELS.get(str(kernel), str(kernel)))
    return found


def verdict_text(word: str) -> str:
    """Write a verdict's word for people."""
    return word.replace("_", "-")


def shown_arms(cell: Json) -> list[str]:
    """Name the arms whose lines are shown: not the baseline; the control only if alone."""
    control = control_name(cell)
    arms = [a["name"] for a in cell["arms"] if a["role"] == "arm"]
    return arms or ([control] if control is not None else [])


def results_table(
    cell: Json, records: Sequence[Record], primary: bool = True, anchor: str = ""
) -> Table[Result]:
    """Lay out the primary rows of a cell (or, with ``primary=False``, all the others).

    ``anchor``: of the cell on the page; numbers lead to the runs that they are made of.
    """
    rows = [(i, row) for i, row in enumerate(cell["rows"]) if row["primary"] is primary]
    arms, ran = shown_arms(cell), kernels(records)
    published = _published(cell, [row for _, row in rows], arms)
    units = {row["unit"] for _, row in rows if row["metric"] is not None}
    unit = f" ({unit_name(units.pop())})" if len(units) == 1 else ""
    columns = [_named([row for _, row in rows], unit)]
    if ran:
        columns.append(
            Column(
                "kernel",
                lambda line: ran.get(line.row["case"], ""),
                number=False,
                least_width=WIDER if len(arms) > 1 else WIDE,
                once=True,
            )
        )

    def runs(line: Result) -> str:
        return f"#{anchor}r{line.index}"

    columns += _arm_columns(cell, arms, unit, runs) if arms else [_alone(cell, unit, runs)]
    if published and arms:
        columns.append(
            Column(
                "published",
                lambda line: _published_delta(published, line.row, line.arm),
                short="publ.\n%",
                least_width=WIDE,
            )
        )
    shown: list[str | None] = [*arms] or [None]
    lines = [
        Result(i, row, arm, {c["arm"]: c for c in row["comparisons"]}.get(arm), len(arms) > 1)
        for i, row in rows
        for arm in shown
    ]
    notes = [*_notes(cell, published), *_states(records)]
    return Table(tuple(columns), tuple(lines), tuple(notes), wide=True)


def _named(rows: Sequence[Json], unit: str) -> Column[Result]:
    """Name a row by its case, its metric, or both where there are several metrics."""
    requests = all(row["case"] == "all" for row in rows)
    mixed = not requests and len({row["metric"] for row in rows if row["metric"]}) > 1

    def name(line: Result) -> str:
        row = line.row
        text = str(row["metric"] if requests and row["metric"] else row["case"])
        if mixed and row["metric"]:
            text += f": {row['metric']}"
        return f"{text} ({unit_name(row['unit'])})" if row["unit"] == "bytes" and not unit else text

    return Column("metric" if requests else "batch", name, number=False, once=True)


def _alone(cell: Json, unit: str, link: Callable[[Result], str]) -> Column[Result]:
    """Show the baseline where nothing is compared with it."""
    baseline = cell["arms"][0]["name"]

    def value(line: Result) -> str:
        row = line.row
        return row["skipped"] or value_text(row["arms"][baseline]["median"], row["unit"])

    return Column(f"{baseline}{unit}", value, once=True, link=link)


def _arm_columns(
    cell: Json, arms: Sequence[str], unit: str, link: Callable[[Result], str]
) -> Iterator[Column[Result]]:
    baseline, level, died = cell["arms"][0]["name"], level_text(cell), deaths(cell)

    def measured(line: Result, arm: str | None) -> str:
        if line.row["skipped"] is not None:
            return ""
        middle = line.row["arms"][arm]["median"]
        return (
            died[str(arm)]
            if middle is None and arm in died
            else value_text(middle, line.row["unit"])
        )

    def decided(line: Result) -> str:
        if line.row["skipped"] is not None:
            return f"skipped: {line.row['skipped']}"
        return "" if line.verdict is None else verdict_text(line.verdict)

    if len(arms) > 1:
        yield Column("arm", lambda line: line.arm, number=False)
    yield Column(f"{baseline}{unit}", lambda line: measured(line, baseline), once=True, link=link)
    own = arms[0] if len(arms) == 1 else "arm"
    yield Column(f"{own}{unit}", lambda line: measured(line, line.arm), link=link)
    yield Column("delta", _compared(percent_text, "effect_pct"), short="delta\n%", link=link)
    yield Column(
        f"adjusted {level} CI (%)",
        _compared(interval_text, "ci_low_pct", "ci_high_pct"),
        short=f"adjusted\n{level} CI, %",
        link=link,
    )
    yield Column(
        "adjusted p",
        _compared(p_text, "p_adjusted"),
        short="adjusted\np",
        least_width=WIDE,
        link=link,
    )
    yield Column("verdict", decided, number=False, verdict=True)


def _states(records: Sequence[Record]) -> list[str]:
    """Say what the caches held when a launch was timed, where the records know it."""
    found = {case.notes.get("state") for record in records for case in record.cases}
    said_of = {
        "hot": "hot caches: every launch follows one of the same arm on the same input",
        "cold": "cold caches: more memory than they hold is read before every launch",
    }
    known = [text for state, text in said_of.items() if state in found]
    return [f"Timed on {'; '.join(known)}."] if known else []


def deaths(cell: Json) -> dict[str, str]:
    """Map every arm with failed runs to the names of their outcomes."""
    found: dict[str, list[str]] = {}
    for failure in cell["failures"]:
        _, _, arm = parse_run_name(failure["run"])
        found.setdefault(arm, []).append(str(failure["outcome"]))
    return {arm: ", ".join(dict.fromkeys(outcomes)) for arm, outcomes in found.items()}


def _published(
    cell: Json, shown: Sequence[Json], arms: Sequence[str]
) -> dict[tuple[str, str], Json]:
    """Index by case and metric what was published of the rows and arms that are shown."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return {}
    rows = published.get("rows") or []
    index = {(str(r["case"]), str(r.get("metric", published.get("metric")))): r for r in rows}
    ours = {(row["case"], row["metric"]) for row in shown}
    return {
        key: row
        for key, row in index.items()
        if key in ours
        and any(arm in (row.get(k) or {}) for k in ("delta_pct", "p") for arm in arms)
    }


def _published_delta(published: Mapping[tuple[str, str], Json], row: Json, arm: str | None) -> str:
    found = published.get((row["case"], row["metric"]))
    if found is None:
        return ""
    delta = (found.get("delta_pct") or {}).get(arm)
    p = (found.get("p") or {}).get(arm)
    text = percent_text(float(delta)) if delta is not None else ""
    return f"{text} (p = {p})" if p is not None else text


def published_line(cell: Json) -> str | None:
    """Say whose numbers stand in the published column."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return None
    return (
        f"published: {published.get('machine', 'machine not stated')}; "
        f"{published.get('source', 'source not stated')}. Theirs, never mixed with ours."
    )


def _notes(cell: Json, published: Any) -> list[str]:
    line = published_line(cell) if published else None
    notes, shown = [line] if line else [], shown_arms(cell)
    floors = {
        c["p_floor"]
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["p_floor"] and c["arm"] in shown
    }
    if floors:
        notes.append(
            f"Interval and p: one permutation test within blocks ({relabelled(cell)}), adjusted "
            f"over all rows and arms; smallest reachable p {p_text(min(floors))}. "
            "Delta: Hodges-Lehmann, above 0 where the metric is larger."
        )
    return notes


def published_table(cell: Json) -> Table[Json] | None:
    """Lay out the published numbers as they were published; None where there are none.

    Of cases that this cell has, whatever was measured of them.
    """
    published, cases = cell["published"], {row["case"] for row in cell["rows"]}
    given = published.get("rows") or [] if isinstance(published, Mapping) else []
    rows = [row for row in given if row["case"] in cases]
    arms = list(dict.fromkeys(arm for row in rows for arm in row.get("arms") or {}))
    if not rows or not arms:
        return None
    units = {unit_name(row.get("unit", published.get("unit"))) for row in rows}
    unit = f" ({next(iter(units))})" if len(units) == 1 and units != {""} else ""
    deltas = list(dict.fromkeys(arm for row in rows for arm in row.get("delta_pct") or {}))

    def name(row: Json) -> str:
        if unit:
            return str(row["case"])
        own = unit_name(row.get("unit", published.get("unit")))
        return f"{row['case']}: {row.get('metric', published.get('metric'))} ({own})"

    columns = [Column[Json]("batch", name, number=False)]
    columns += [Column(f"{arm}{unit}", _given("arms", arm, "{:,}".format)) for arm in arms]
    for arm in deltas:
        heading = "delta" if len(deltas) == 1 else f"delta, {arm}"
        columns.append(Column(heading, _given("delta_pct", arm, percent_text)))
    return Table(tuple(columns), tuple(rows), (published_line(cell) or "",))


def _given(key: str, arm: str, form: Callable[[Any], str]) -> Callable[[Json], str]:
    """Return a column's value: what was published of an arm, written; nothing where it was not."""

    def value(row: Json) -> str:
        numbers = row.get(key) or {}
        return form(numbers[arm]) if arm in numbers else ""

    return value


def host_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Lay out the host's time to build the maps of a step, median per arm (us), if noted."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            if isinstance(case.notes.get("map_us"), int | float):
                times = found.setdefault(case.case, {}).setdefault(record.arm, [])
                times.append(float(case.notes["map_us"]))
    if not found:
        return None

    def middle(arm: str) -> Callable[[str], str]:
        return lambda case: value_text(median(found[case][arm])) if arm in found[case] else ""

    columns = [Column[str]("batch", said, number=False)]
    columns += [Column(f"{a['name']} (µs)", middle(a["name"])) for a in cell["arms"]]
    note = "Once per step, before the first dispatch; not part of the dispatch times above."
    return Table(tuple(columns), tuple(found), (note,))


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
