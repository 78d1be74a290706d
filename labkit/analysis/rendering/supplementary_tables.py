"""Tables of a cell besides its results: host times, output agreement, medians, failed runs.

Also the sensitivity analyses of a cell, and the table of a study's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import (
    interval_text,
    p_text,
    percent_text,
    unit_name,
    value_text,
)
from labkit.analysis.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.rendering.report_parts import Parts, section, table_parts
from labkit.analysis.rendering.tables import Column, Table, text_or_empty
from labkit.analysis.sensitivity_analysis import SensitivityResult
from labkit.analysis.verdict_sentences import row_name
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.rendering.cell_report import CellReport

Json = Mapping[str, Any]
HOST_TIMES = ("map_us", "plan_us")
MEDIANS_TITLE = "Medians and quartiles"


def host_times(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the host times (us) of all runs: ``{(case, name): {arm: [time, ...]}}``.

    The names are those of :data:`HOST_TIMES`.
    """
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            for name in HOST_TIMES:
                if isinstance(case.notes.get(name), int | float):
                    by_arm = times.setdefault((case.case, name), {})
                    by_arm.setdefault(record.arm, []).append(float(case.notes[name]))
    return times


def host_times_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Return the host's time per step to build the maps (us), as each arm's median over runs.

    If records also note the time of the whole plan, each arm has a second column. None if records
    note neither.
    """
    times = host_times(records)
    if not times:
        return None

    def median_text(arm: str, name: str) -> Callable[[str], str]:
        def value(case: str) -> str:
            values = times.get((case, name), {}).get(arm)
            return value_text(median(values)) if values else ""

        return value

    with_plan = any(name == "plan_us" for _, name in times)
    suffixes = {"map_us": " maps", "plan_us": " plan"} if with_plan else {"map_us": ""}
    columns = [Column[str]("batch", text_or_empty, numeric=False)]
    columns += [
        Column(f"{arm['name']}{suffix} (µs)", median_text(arm["name"], name))
        for arm in cell["arms"]
        for name, suffix in suffixes.items()
    ]
    notes = ["Once per step, before the first dispatch; not part of the dispatch times above."]
    if with_plan:
        notes.append(
            "Plan: everything that the layers of a step share, including the maps: checking the "
            "batch, deriving lengths, slots and tables, and copying inputs to the device."
        )
    cases = dict.fromkeys(case for case, _ in times)
    return Table(tuple(columns), tuple(cases), tuple(notes))


@section("Host time to build the maps")
def host_times_section(report: CellReport) -> Parts:
    """Show the host's time per step to build the maps."""
    return table_parts(host_times_table(report.cell, report.records))


def output_noun(cell: Json) -> str:
    """Return the noun for the outputs that are counted: requests, picks (of frames), token rows."""
    if any(row["metric"] == "decode_ms" for row in cell["rows"]):
        return "picks"
    return "requests" if all(row["case"] == "all" for row in cell["rows"]) else "token rows"


def agreement_table(report: IdentityReport, noun: str) -> Table[OutputAgreement] | None:
    """Return the number of every arm's outputs that agree with the reference run's.

    ``noun``: plural noun for the outputs (:func:`output_noun`). None if nothing was compared.
    """
    agreements = [agreement for agreement in report.agreement if agreement.total]
    if not agreements:
        return None

    def first_difference(agreement: OutputAgreement) -> str:
        first = report.first(agreement.arm)
        return "none" if first is None else f"{first.case}: {first.where}; {first.run}"

    columns: tuple[Column[OutputAgreement], ...] = (
        Column("arm", lambda a: a.arm, numeric=False),
        Column(f"{noun} that agree in every run", lambda a: f"{a.agree:,} of {a.total:,}"),
        Column("agreeing prefix", lambda a: a.prefix, "{:.1%}".format),
        Column("first difference", first_difference, numeric=False),
    )
    return Table(columns, tuple(agreements), (f"Compared with run {report.reference}.",))


@section("Outputs")
def outputs_section(report: CellReport) -> Parts:
    """Show the number of outputs that agree with the reference run's."""
    return table_parts(agreement_table(report.analysis.identity, output_noun(report.cell)))


@dataclass(frozen=True)
class ArmInRow:
    """An arm in one row of the cell: its summary and its comparison (empty for the baseline)."""

    row: Json
    arm: str
    summary: Json
    comparison: Json


def medians_table(cell: Json) -> Table[ArmInRow]:
    """Return every arm's own median and quartiles in every row. Primary rows come first."""
    lines = [
        ArmInRow(row, arm, summary, comparisons.get(arm, {}))
        for row in sorted(cell["rows"], key=lambda row: not row["primary"])
        if row["skipped"] is None
        for comparisons in [{c["arm"]: c for c in row["comparisons"]}]
        for arm, summary in row["arms"].items()
    ]

    metrics = {line.row["metric"] for line in lines if line.row["case"] != "all"}

    def name(line: ArmInRow) -> str:
        case, metric = line.row["case"], line.row["metric"]
        return f"{case}: {metric}" if len(metrics) > 1 and case != "all" else row_name(line.row)

    def quantile(key: str) -> Callable[[ArmInRow], str]:
        return lambda line: value_text(line.summary[key], line.row["unit"])

    def wins(line: ArmInRow) -> str | None:
        count = line.comparison.get("wins")
        return None if count is None else f"{count} of {line.comparison['blocks']}"

    columns: tuple[Column[ArmInRow], ...] = (
        Column("row", name, numeric=False),
        Column("arm", lambda line: line.arm, numeric=False),
        Column("unit", lambda line: unit_name(line.row["unit"]), numeric=False),
        *(Column(key, quantile(key)) for key in ("median", "q1", "q3")),
        Column("runs", lambda line: line.summary["n"]),
        Column("blocks won", wins),
        Column(
            "detectable effect",
            lambda line: line.comparison.get("mde_pct"),
            lambda pct: "" if pct is None else f"{pct:.1f}%",
        ),
    )
    return Table(columns, tuple(lines))


@section(MEDIANS_TITLE)
def medians_section(report: CellReport) -> Parts:
    """Show every arm's own median and quartiles."""
    return table_parts(medians_table(report.cell))


def sensitivity_table(cell: Json, results: Sequence[SensitivityResult]) -> Table[SensitivityResult]:
    """Return one line per sensitivity analysis of a row and arm."""
    columns: tuple[Column[SensitivityResult], ...] = (
        Column("row", lambda result: row_name(cell["rows"][result.row]), numeric=False),
        Column("arm", lambda result: result.arm, numeric=False),
        Column("analysis", lambda result: result.how, numeric=False),
        Column("delta", lambda result: result.effect_pct, percent_text),
        Column(
            "CI alone (%)",
            lambda result: result.ci_pct or (None, None),
            lambda ci: interval_text(*ci),
        ),
        Column("p alone", lambda result: result.p, p_text),
        Column("blocks", lambda result: result.blocks),
    )
    note = "Of each row alone, not adjusted. The verdicts above do not use these numbers."
    return Table(columns, tuple(results), (note,), prose=True)


def failures_table(cell: Json, record_folder: str = "") -> Table[Json]:
    """Return the failed runs, linked to their records."""

    def link(failure: Json) -> str:
        return f"{record_folder}runs/{failure['run']}.json"

    columns: tuple[Column[Json], ...] = (
        Column("run", lambda failure: failure["run"], numeric=False, link=link),
        Column("outcome", lambda failure: failure["outcome"], numeric=False),
        Column("detail", lambda failure: failure["detail"], str, numeric=False),
    )
    return Table(columns, tuple(cell["failures"]))


@section("Failed runs")
def failures_section(report: CellReport) -> Parts:
    """Show the failed runs."""
    return table_parts(failures_table(report.cell, report.record_folder))


def cells_table(study: Json, indices: Iterable[int]) -> Table[tuple[int, Json]]:
    """Return the study's cells at ``indices`` with their answers and gates."""
    columns: tuple[Column[tuple[int, Json]], ...] = (
        Column("cell", lambda c: c[1]["cell"], numeric=False, link=lambda c: f"#cell{c[0]}"),
        Column("answer", lambda c: c[1]["answer"], numeric=False),
        Column("gates", lambda c: c[1]["gates"], gates_text, numeric=False),
    )
    return Table(columns, tuple((i, study["cells"][i]) for i in indices), prose=True)


def gates_text(gates: Mapping[str, str]) -> str:
    """Return all gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {status}" for name, status in gates.items())
