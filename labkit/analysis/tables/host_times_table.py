"""Host times: the time per step that the host takes to build a kernel's maps and plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table, text_or_empty
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

HOST_TIMES = ("map_us", "plan_us")


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


def host_times_table(cell: Cell, records: Sequence[Record]) -> Table[str] | None:
    """Return the host's time per step to build the maps (us), as each arm's median over runs.

    Each arm has a second column if the records have the time to build the whole plan. The result is
    None if the records have neither time.
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
        Column(f"{arm.name}{suffix} (µs)", median_text(arm.name, name))
        for arm in cell.arms
        for name, suffix in suffixes.items()
    ]
    notes = [
        "The host builds the maps once per step, before the first dispatch; the dispatch times "
        "above exclude this."
    ]
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
