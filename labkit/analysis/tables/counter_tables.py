"""Tables that explain the times: counters of kernels and engines, queued launches, roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from labkit.analysis.charts.roofline import (
    RooflinePoint,
    cases_line,
    roofline_chart,
    roofline_points,
)
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    Parts,
    PictureFile,
    TablePart,
    section,
    table_section,
)
from labkit.analysis.document.table_model import Column, Table, text_or_empty
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import significant_text, value_text
from labkit.records import Record, counter_registry

CaseAndArm = tuple[str, str]
CounterValues = Mapping[str, set[float]]
LEADING_COUNTERS = (
    "attention.search_iterations",
    "attention.dependent_loads",
    "attention.surplus_threadgroups",
    "attention.kv_blocks_visited",
    "attention.bytes",
)
VARIES = "varies"
# Times, and counters from which other counters are derived.
HIDDEN_COUNTERS = ("step_ms", "device_ms", "host_ms", "attention.map_us", "peak_kv_bytes")
# Column headings of the notes that records hold on queued launches, by the note's name.
LAUNCH_NOTES = {
    "empty_us": "empty, in a chain (µs)",
    "empty_single_us": "empty, by itself (µs)",
    "host_us": "described by the host (µs)",
}
PER_STEP_TIMES = {"host_ms": "host time per step (ms)", "device_ms": "model time per step (ms)"}
HOST_TIMES = ("map_us", "plan_us")


def _dispatch_table(cell: Cell, records: Sequence[Record]) -> Table[CaseAndArm] | None:
    """Return the counters of one dispatch by case and arm, or None if no record has any.

    Counters that are 0 everywhere are omitted. So are counters that are never above 1, because they
    only say which path ran, and the gate *engaged* checks them. A counter that differs between
    runs of an arm is not deterministic and is shown as ``varies``.
    """
    counters: dict[CaseAndArm, dict[str, set[float]]] = {}
    for record in records:
        for case in record.cases:
            by_name = counters.setdefault((case.case, record.arm), {}) if record.ok else {}
            for name, value in (case.known_notes.get("counters") or {}).items():
                by_name.setdefault(name, set()).add(float(value))
    informative = {
        name
        for by_name in counters.values()
        for name, values in by_name.items()
        if max(values) > (0.0 if name in LEADING_COUNTERS else 1.0)
    }
    names = [
        *(name for name in LEADING_COUNTERS if name in informative),
        *sorted(informative.difference(LEADING_COUNTERS)),
    ]
    if not names:
        return None
    columns = (
        Column[CaseAndArm]("batch", lambda key: key[0], numeric=False),
        Column("arm", lambda key: key[1], numeric=False),
        *(_counter_column(name, counters) for name in names),
    )
    cases = dict.fromkeys(case for case, _ in counters)
    lines = [(case, arm) for case in cases for arm in cell.real_arms if counters.get((case, arm))]
    note = (
        "Counts per dispatch are the same on every machine with the same number of threads. The "
        "kernel itself counts, except in the columns called computed, which follow from its plan "
        "on the host."
    )
    return Table(columns, tuple(lines), (note,))


dispatch_section = table_section("Work per dispatch", _dispatch_table)


def _counter_column(name: str, counters: Mapping[CaseAndArm, CounterValues]) -> Column[CaseAndArm]:
    counter = counter_registry.find_counter(name)
    origin = "" if counter is not None and counter.counted_by_kernel else " (computed)"
    return Column(
        _counter_heading(name) + origin, lambda key: counters[key].get(name), _values_text
    )


def _counter_heading(name: str) -> str:
    group, _, rest = name.partition(".")
    words = rest.replace("_", " ").replace("kv ", "KV ")
    return words if group == "attention" else f"{group.replace('_', '-')} {words}"


def _values_text(values: set[float] | None) -> str:
    if not values:
        return ""
    return VARIES if len(values) > 1 else f"{next(iter(values)):,.0f}"


def _launch_queue_table(cell: Cell, records: Sequence[Record]) -> Table[CaseAndArm] | None:
    """Return the median times of launches in a chain, of single launches and of empty launches.

    None if no arm ran on a device with a launch queue.
    """
    samples: dict[CaseAndArm, dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            if not record.ok or "launches" not in case.known_notes:
                continue
            by_name = samples.setdefault((case.case, record.arm), {})
            for metric in case.metrics:
                by_name.setdefault(metric.name, []).append(median(metric.repeats))
            for name in ("launches", *LAUNCH_NOTES):
                by_name.setdefault(name, []).append(median(_as_list(case.notes[name])))
    if not samples:
        return None
    times = {key: _launch_medians(by_name) for key, by_name in samples.items()}
    columns = (
        Column[CaseAndArm]("batch", lambda key: key[0], numeric=False),
        Column("arm", lambda key: key[1], numeric=False),
        Column("launches in a chain", lambda key: times[key]["launches"], "{:,.0f}".format),
        Column("in a chain (µs)", lambda key: times[key]["chain"], value_text),
        Column("by itself (µs)", lambda key: times[key]["single"], value_text),
        *(_launch_column(name, heading, times) for name, heading in LAUNCH_NOTES.items()),
    )
    cases = dict.fromkeys(case for case, _ in samples)
    lines = [(case, arm) for case in cases for arm in cell.real_arms if (case, arm) in samples]
    note = (
        "A chain is timed as a whole; each of its launches reads the output of the one before. "
        "Every time includes the cost of an empty launch. No time includes the host's work to "
        "describe a launch, which it does before it waits for the launch."
    )
    return Table(columns, tuple(lines), (note,))


launch_queue_section = table_section("Queued launches", _launch_queue_table)


def _launch_medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    medians: dict[str, float | None] = {name: median(values) for name, values in samples.items()}
    is_chain = (medians["launches"] or 0) > 1
    medians["chain"] = medians["dispatch_us"] if is_chain else None
    medians["single"] = medians["single_us" if is_chain else "dispatch_us"]
    return medians


def _launch_column(
    name: str, heading: str, times: Mapping[CaseAndArm, Mapping[str, float | None]]
) -> Column[CaseAndArm]:
    return Column(heading, lambda key: times[key][name], value_text)


def _as_list(value: Any) -> Sequence[float]:
    return value if isinstance(value, list) else [value]


def _engine_counters_table(cell: Cell) -> Table[str] | None:
    """Return the counters that differ between arms, one per line, as medians over the runs.

    None for a kernel workload, which has no engine steps, and for a cell with one arm.
    """
    arms = cell.real_arms
    counters = {arm.name: arm.counters for arm in cell.arms if arm.name in arms}
    if len(counters) < 2 or not any(by_name.get("steps.total") for by_name in counters.values()):
        return None
    columns = (
        Column[str]("counter", lambda name: PER_STEP_TIMES.get(name, name), numeric=False),
        *(Column(arm, _counter_text(by_name)) for arm, by_name in counters.items()),
    )
    note = (
        "Medians over runs of the counters that differ between arms. A counter that is 0 or was "
        "not counted is empty."
    )
    return Table(columns, (*_differing(counters), *_per_step_times(counters)), (note,))


engine_counters_section = table_section(
    "Engine counters", lambda cell, records: _engine_counters_table(cell)
)


def _differing(counters: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name in sorted({name for by_name in counters.values() for name in by_name}):
        values = {by_name.get(name) or 0.0 for by_name in counters.values()}
        if name not in HIDDEN_COUNTERS and len(values) > 1:
            yield name


def _per_step_times(counters: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        name for name in PER_STEP_TIMES if any(name in by_name for by_name in counters.values())
    ]


def _counter_text(counters: Mapping[str, float]) -> Callable[[str], str]:
    """Return a function from a counter's name to its text: a count, or a time per step."""

    def value(name: str) -> str:
        if name not in PER_STEP_TIMES:
            return count_or_measure_text(counters[name]) if counters.get(name) else ""
        steps = counters.get("steps.total")
        return f"{counters[name] / steps:.3f}" if steps and name in counters else ""

    return value


def count_or_measure_text(value: float) -> str:
    """Format an integer with thousands separators, other numbers to 3 significant digits.

    From 100 on, other numbers have one decimal.
    """
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else significant_text(value, 3)


def _roofline_table(points: Sequence[RooflinePoint]) -> Table[RooflinePoint]:
    """Return a table of each point's work, its attained rates and its share of the binding limit.

    ``points`` must not be empty.
    """
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


def _host_times_table(cell: Cell, records: Sequence[Record]) -> Table[str] | None:
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


host_times_section = table_section("Host time to build the maps", _host_times_table)
