"""Tables of kernel launches: queued launches, roofline, host time to build maps, their work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

from labkit.analysis.charts.roofline import (
    RooflinePoint,
    cases_line,
    roofline_chart,
    roofline_points,
)
from labkit.analysis.document.report_parts import (
    BulletList,
    CellSource,
    ChartPart,
    Parts,
    PictureFile,
    ReportPart,
    TablePart,
    section,
    table_section,
)
from labkit.analysis.document.table_model import Column, Table, text_or_empty
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import signed_text, significant_text, value_text
from labkit.records import Record

CaseAndArm = tuple[str, str]
# Column headings of the times of queued launches: medians, and the notes that records hold.
LAUNCH_TIMES = {
    "chain": "in a chain (µs)",
    "single": "by itself (µs)",
    "empty_us": "empty, in a chain (µs)",
    "empty_single_us": "empty, by itself (µs)",
    "host_us": "described by the host (µs)",
}
LAUNCH_NOTES = ("launches", "empty_us", "empty_single_us", "host_us")
HOST_TIMES = ("map_us", "plan_us")
MIN_CHANGE = 0.005  # smaller differences of counts are not worth a sentence


def _launch_queue_table(cell: Cell, records: Sequence[Record]) -> Table[CaseAndArm]:
    """Return the median times of launches in a chain, of single ones and of empty ones."""
    samples: dict[CaseAndArm, dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            if not record.ok or "launches" not in case.known_notes:
                continue
            by_name = samples.setdefault((case.case, record.arm), {})
            for metric in case.metrics:
                by_name.setdefault(metric.name, []).append(median(metric.repeats))
            for name in LAUNCH_NOTES:
                by_name.setdefault(name, []).append(median(_as_list(case.notes[name])))
    times = {key: _launch_medians(by_name) for key, by_name in samples.items()}

    def at(key: CaseAndArm, name: str) -> float | None:
        return times[key][name]

    columns: tuple[Column[CaseAndArm], ...] = (
        Column("batch", itemgetter(0), numeric=False),
        Column("arm", itemgetter(1), numeric=False),
        Column("launches in a chain", partial(at, name="launches"), "{:,.0f}".format),
        *(Column(heading, partial(at, name=n), value_text) for n, heading in LAUNCH_TIMES.items()),
    )
    cases = dict.fromkeys(case for case, _ in samples)
    lines = [(case, arm) for case in cases for arm in cell.real_arms if (case, arm) in samples]
    note = (
        "A chain is timed as a whole; each of its launches reads the output of the one before. "
        "Every time includes the cost of an empty launch. No time includes the host's work to "
        "describe a launch, which it does before it waits for the launch."
    )
    return Table(columns, tuple(lines), (note,))


def _launch_medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    medians = {name: median(values) for name, values in samples.items()}
    is_chain = medians["launches"] > 1
    chain = medians["dispatch_us"] if is_chain else None
    return {
        **medians,
        "chain": chain,
        "single": medians["single_us" if is_chain else "dispatch_us"],
    }


def _as_list(value: Any) -> Sequence[float]:
    return value if isinstance(value, list) else [value]


def _roofline_table(points: Sequence[RooflinePoint]) -> Table[RooflinePoint]:
    """Return each point's work, rates and share of the binding limit; one point or more."""
    limits = points[0].limits
    columns = [
        Column[RooflinePoint]("batch", lambda p: p.case, numeric=False),
        Column("arm", lambda p: p.arm, numeric=False),
        Column("MB", lambda p: p.bytes / 1e6, value_text),
        Column("MFLOP", lambda p: p.flops / 1e6, value_text),
        Column("FLOP/byte", lambda p: p.intensity, value_text),
        Column("GB/s", lambda p: p.gb_s, value_text),
        Column("GFLOP/s", lambda p: p.gflop_s, value_text),
    ]
    note = (
        "Bytes: the least that must move (each request's keys and values once, queries, output). "
        "Times: medians of the runs."
    )
    if limits is None:
        no_limits = "No limits were measured for this device, so there are no shares."
        return Table(tuple(columns), tuple(points), (note, no_limits))
    columns.append(Column("bound by", lambda p: p.bound, text_or_empty, numeric=False))
    columns.append(Column("share of limit", lambda p: p.share, "{:.0%}".format))
    limits_note = f"{limits.text()} A small batch may fit into the cache and exceed the bandwidth."
    return Table(tuple(columns), tuple(points), (note, limits_note))


@section("Roofline")
def roofline_section(report: CellSource) -> Parts:
    """Show attained bandwidth and FLOP rates beside the machine's limits."""
    cell, points = report.cell, roofline_points(report.cell, report.records)
    if not points:
        return []
    chart = ChartPart(roofline_chart(cell, points), cases_line(points))
    table = TablePart(_roofline_table(points))
    return [chart, table, PictureFile(cell.stem("roofline"), "Roofline", [chart])]


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


def _host_times_table(cell: Cell, records: Sequence[Record]) -> Table[str]:
    """Return the host's median time per step to build maps and, if noted, whole plans (us)."""
    times = host_times(records)
    with_plan = any(name == "plan_us" for _, name in times)
    suffixes = {"map_us": " maps", "plan_us": " plan"} if with_plan else {"map_us": ""}

    def median_text(case: str, arm: str, name: str) -> str:
        values = times.get((case, name), {}).get(arm)
        return value_text(median(values)) if values else ""

    columns = [Column[str]("batch", text_or_empty, numeric=False)]
    columns += [
        Column(f"{arm.name}{suffix} (µs)", partial(median_text, arm=arm.name, name=name))
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


launch_queue_section = table_section("Queued launches", _launch_queue_table)
host_times_section = table_section("Host time to build the maps", _host_times_table)
HOST_SECTIONS = (launch_queue_section, host_times_section, roofline_section)


@section("Why: the work of a launch")
def launch_work_section(report: CellSource) -> Iterator[ReportPart]:
    """Show what differs between the arms' launches: their work, and hardware counters."""
    noted = [r for r in report.records if r.ok and r.known_notes.get("hardware")]
    if not noted:
        return
    sentences = [text for arm in report.cell.compared_arms for text in _work_texts(report, arm)]
    reasons = {reason for r in noted if (reason := r.known_notes["hardware"].get("unavailable"))}
    if reasons:
        sentences.append(f"No hardware counters: {'; '.join(sorted(reasons))}.")
    yield BulletList(sentences)


def _work_texts(report: CellSource, arm: str) -> Iterator[str]:
    counts = _launch_counts(report.records)
    for row in report.cell.primary_rows:
        base, own = (counts.get((row.case, name), {}) for name in (report.cell.baseline, arm))
        found = list(_changes(own, base, report.cell.baseline))
        comparison = row.comparison(arm)
        if found and comparison is not None and comparison.effect_pct is not None:
            time = f"{signed_text(comparison.effect_pct)} % time"
            yield f"{report.cell.row_name(row)}, {arm}: {', '.join(found)}; {time}."


def _changes(own: Mapping[str, float], base: Mapping[str, float], baseline: str) -> Iterator[str]:
    """Yield how counts differ from the baseline's; what was not counted there is left out."""
    for name, count in own.items():
        words, before = name.removeprefix("attention.").replace("_", " "), base.get(name)
        if before == 0 and count:
            yield f"{significant_text(count, 3)} {words} (0 in {baseline})"
        elif before and abs(count / before - 1) > MIN_CHANGE:
            yield f"{signed_text(100 * (count / before - 1))} % {words}"


def _launch_counts(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the counts of one launch by case and arm, each the median over the runs."""
    runs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record, case in ((r, c) for r in records for c in r.cases):
        counted = {
            n: v
            for n, v in (case.known_notes.get("counters") or {}).items()
            if n.startswith("attention.") and n != "attention.map_us"
        }
        counted |= (record.known_notes.get("hardware") or {}).get(case.case) or {}
        for name, value in counted.items():
            by_name = runs.setdefault((case.case, record.arm), {})
            by_name.setdefault(name, []).append(float(value))
    return {key: {n: median(v) for n, v in by_name.items()} for key, by_name in runs.items()}
