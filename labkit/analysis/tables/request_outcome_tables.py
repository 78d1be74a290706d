"""Tables of request outcomes and of arrival rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

Json = Mapping[str, Any]
NotesByArm = Mapping[str, Sequence[Json]]
COUNTS = {
    "requests": "requests",
    "served": "served",
    "refused": "refused",
    "failed": "failed",
}


def request_notes(records: Sequence[Record]) -> dict[str, list[Json]]:
    """Return the notes on requests (``traffic`` in the records) of all runs, by arm."""
    notes: dict[str, list[Json]] = {}
    for record in records:
        for case in record.cases:
            if "traffic" in case.notes:
                notes.setdefault(record.arm, []).append(case.notes["traffic"])
    return notes


def request_outcomes_table(cell: Cell, records: Sequence[Record]) -> Table[str] | None:
    """Return the outcomes of every arm's requests, or None if no record notes them."""
    notes = request_notes(records)
    arms = [arm for arm in cell.real_arms if arm in notes]
    if not arms:
        return None
    all_notes = [note for arm_notes in notes.values() for note in arm_notes]
    open_loop = any("late_ms" in note for note in all_notes)
    columns = [Column[str]("arm", str, numeric=False)]
    columns += [_total_column(notes, key, heading) for key, heading in COUNTS.items()]
    if any("good" in note for note in all_notes):
        columns.append(_total_column(notes, "good", "within the limits"))
    if open_loop:
        columns += [_median_column(notes, heading, read) for heading, read in SENDER_TIMES.items()]
    if any(_sender_share(note) is not None for note in all_notes):
        share = _median_column(notes, "sender's share of a core", _sender_share, "{:.2%}".format)
        columns.append(share)
    lost = any(note.get("refused") or note.get("failed") for note in all_notes)
    times = " but the time of a run" if lost else ""
    lines = [f"Requests of all runs. No other number{times} includes refused or failed requests."]
    if open_loop:
        lines.append(
            "Medians over runs. Requested: the workload's request rate; due: the rate of the "
            "arrival times drawn from it; sent: the rate at which requests left the client. Wait "
            "at the client: because too many requests were in flight. Sender late: its own delay."
        )
    return Table(tuple(columns), tuple(arms), tuple(lines))


@section("Request outcomes")
def request_outcomes_section(report: CellReport) -> Parts:
    """Show the numbers of served, refused and failed requests."""
    return table_parts(request_outcomes_table(report.cell, report.records))


def _total_column(notes: NotesByArm, key: str, heading: str) -> Column[str]:
    return Column(heading, lambda arm: sum(note.get(key, 0) for note in notes[arm]), "{:,}".format)


def _median_column(
    notes: NotesByArm,
    heading: str,
    read: Callable[[Json], float | None],
    formatter: Callable[[Any], str] = value_text,
) -> Column[str]:
    """Return a column of medians over runs. A cell is empty if no run of the arm has the number."""

    def value(arm: str) -> float | None:
        values = [v for note in notes[arm] if (v := read(note)) is not None]
        return median(values) if values else None

    return Column(heading, value, lambda v: "" if v is None else formatter(v))


def _sender_share(note: Json) -> float | None:
    return note.get("sender_cpu_share")


def _nested(*path: str) -> Callable[[Json], float | None]:
    """Return a function that reads the number at a path of keys, or None if a key is missing."""

    def read(note: Json) -> float | None:
        value: Any = note
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    return read


SENDER_TIMES: Mapping[str, Callable[[Json], float | None]] = {
    "requested (1/s)": _nested("asked_per_s"),
    "due (1/s)": _nested("due_per_s"),
    "sent (1/s)": _nested("sent_per_s"),
    "wait at the client, p50 (ms)": _nested("queue_ms", "p50"),
    "p99": _nested("queue_ms", "p99"),
    "sender late, p99 (ms)": _nested("late_ms", "p99"),
}
