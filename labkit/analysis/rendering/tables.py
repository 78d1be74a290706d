"""Tables: columns declared once, each with heading, value and format, and lines of any type.

Beside that the tables of a cell that are no results: the host's time,
how far outputs agree, spread, second analyses, failed runs; and the cells of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from labkit.analysis.number_format import interval_text, p_text, percent_text, value_text
from labkit.analysis.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.sensitivity_analysis import SensitivityResult
from labkit.analysis.verdict_sentences import row_name
from labkit.records import Record

T = TypeVar("T")
Json = Mapping[str, Any]
SECONDS = "Of each row alone, not adjusted. The verdicts above do not use these numbers."


def text_or_empty(value: Any) -> str:
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
    form: Callable[[Any], str] = text_or_empty
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

    ``wide``: a table of results, whose lines are :class:`.results_table.ResultLine`.
    ``prose``: its cells are phrases, which may be broken.
    """

    columns: tuple[Column[T], ...]
    lines: tuple[T, ...]
    notes: tuple[str, ...] = ()
    wide: bool = False
    prose: bool = False

    def cells(self, line: T) -> list[str]:
        """Return a line's cells as text."""
        return [column.text(line) for column in self.columns]


def host_times(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return by case and name (``map_us``, ``plan_us``) what the host took in each arm's runs."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            for name in ("map_us", "plan_us"):
                if isinstance(case.notes.get(name), int | float):
                    arms = found.setdefault((case.case, name), {})
                    arms.setdefault(record.arm, []).append(float(case.notes[name]))
    return found


def host_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Lay out the host's time to build the maps of a step, median per arm (us), if noted.

    Records that note what the whole plan of a step takes have a column for that, too.
    """
    found = host_times(records)
    if not found:
        return None

    def middle(arm: str, name: str) -> Callable[[str], str]:
        def written(case: str) -> str:
            taken = found.get((case, name), {}).get(arm)
            return value_text(median(taken)) if taken else ""

        return written

    planned = any(name == "plan_us" for _, name in found)
    words = {"map_us": " maps", "plan_us": " plan"} if planned else {"map_us": ""}
    columns = [Column[str]("batch", text_or_empty, number=False)]
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
    cases = dict.fromkeys(case for case, _ in found)
    return Table(tuple(columns), tuple(cases), tuple(notes))


def output_unit(cell: Json) -> str:
    """Name what agreement is counted in: requests, picked frames, or token rows of kernel cases."""
    if any(row["metric"] == "decode_ms" for row in cell["rows"]):
        return "picks"
    return "requests" if all(row["case"] == "all" for row in cell["rows"]) else "token rows"


def agreement_table(report: IdentityReport, unit: str) -> Table[OutputAgreement] | None:
    """Lay out how much of every arm's outputs agrees with the reference run's.

    ``unit``: what is counted, in the plural. None where nothing was compared.
    """
    found = [a for a in report.agreement if a.total]
    if not found:
        return None

    def first(a: OutputAgreement) -> str:
        differs = report.first(a.arm)
        return "none" if differs is None else f"{differs.case}: {differs.where}; {differs.run}"

    columns: tuple[Column[OutputAgreement], ...] = (
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


def seconds_table(cell: Json, found: Sequence[SensitivityResult]) -> Table[SensitivityResult]:
    """Lay out the second analyses of rows and arms."""
    columns: tuple[Column[SensitivityResult], ...] = (
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


def cells_table(study: Json, places: Iterable[int]) -> Table[tuple[int, Json]]:
    """Lay out the cells of a study that stand at ``places``, with their answers."""
    columns: tuple[Column[tuple[int, Json]], ...] = (
        Column("cell", lambda c: c[1]["cell"], number=False, link=lambda c: f"#cell{c[0]}"),
        Column("answer", lambda c: c[1]["answer"], number=False),
        Column("gates", lambda c: c[1]["gates"], gates_text, number=False),
    )
    return Table(columns, tuple((i, study["cells"][i]) for i in places), prose=True)


def gates_text(gates: Mapping[str, str]) -> str:
    """Write the gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {status}" for name, status in gates.items())
