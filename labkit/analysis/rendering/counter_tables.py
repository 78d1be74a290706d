"""Tables of the work behind the times: what dispatches and engines counted, and the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from labkit.analysis.number_format import value_text
from labkit.analysis.rendering.roofline import RooflinePoint
from labkit.analysis.rendering.tables import Column, Table, text_or_empty
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record, counter_registry

Json = Mapping[str, Any]
Counts = Mapping[str, set[float]]
FIRST = (
    "attention.search_iterations",
    "attention.dependent_loads",
    "attention.surplus_threadgroups",
    "attention.kv_blocks_visited",
    "attention.bytes",
)
VARIES = "varies"
# Times, and counters of which others are the measure.
LEFT_OUT = ("step_ms", "device_ms", "host_ms", "attention.map_us", "peak_kv_bytes")
# What a record notes of launches in a queue, beside the metrics: heading by note.
QUEUED = {
    "empty_us": "empty, in a chain (µs)",
    "empty_single_us": "empty, by itself (µs)",
    "host_us": "described by the host (µs)",
}
PER_STEP = {"host_ms": "host time per step (ms)", "device_ms": "model time per step (ms)"}


def dispatch_table(cell: Json, records: Sequence[Record]) -> Table[tuple[str, str]] | None:
    """Lay out what one dispatch of each case did, per arm; None where nothing is noted.

    A counter that is 0 everywhere has no column, nor has a flag (never above 1) that says
    which path ran: the gate *engaged* looks at those. One that differs between runs of an
    arm is not deterministic, and its cell says so.
    """
    found: dict[tuple[str, str], dict[str, set[float]]] = {}
    for record in records:
        for case in record.cases:
            counts = found.setdefault((case.case, record.arm), {}) if record.ok else {}
            for name, value in (case.notes.get("counters") or {}).items():
                counts.setdefault(name, set()).add(float(value))
    least = {name: 0.0 if name in FIRST else 1.0 for c in found.values() for name in c}
    seen = {n for c in found.values() for n, values in c.items() if max(values) > least[n]}
    names = [*(n for n in FIRST if n in seen), *sorted(seen.difference(FIRST))]
    if not names:
        return None
    columns = (
        Column[tuple[str, str]]("batch", lambda place: place[0], number=False),
        Column("arm", lambda place: place[1], number=False),
        *(_counter_column(name, found) for name in names),
    )
    cases = dict.fromkeys(case for case, _ in found)
    places = [(case, arm) for case in cases for arm in real_arms(cell) if found.get((case, arm))]
    note = (
        "Per dispatch, the same on every machine with as many threads. Counted by the kernel "
        "itself; what is called computed follows from its plan on the host."
    )
    return Table(columns, tuple(places), (note,))


def _counter_column(name: str, found: Mapping[tuple[str, str], Counts]) -> Column[tuple[str, str]]:
    known = counter_registry.find_counter(name)
    origin = "" if known is not None and known.counted_by_kernel else " (computed)"
    return Column(_heading(name) + origin, lambda place: found[place].get(name), _count)


def _heading(name: str) -> str:
    group, _, what = name.partition(".")
    words = what.replace("_", " ").replace("kv ", "KV ")
    return words if group == "attention" else f"{group.replace('_', '-')} {words}"


def _count(values: set[float] | None) -> str:
    if not values:
        return ""
    return VARIES if len(values) > 1 else f"{next(iter(values)):,.0f}"


def queue_table(cell: Json, records: Sequence[Record]) -> Table[tuple[str, str]] | None:
    """Lay out what a launch took in a chain and by itself, and one that does nothing; medians.

    None where no device has a queue.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        for case in record.cases:
            if not record.ok or "launches" not in case.notes:
                continue
            seen = found.setdefault((case.case, record.arm), {})
            for metric in case.metrics:
                seen.setdefault(metric.name, []).append(median(metric.repeats))
            for name in ("launches", *QUEUED):
                seen.setdefault(name, []).append(median(_listed(case.notes[name])))
    if not found:
        return None
    times = {place: _times(seen) for place, seen in found.items()}
    columns = (
        Column[tuple[str, str]]("batch", lambda place: place[0], number=False),
        Column("arm", lambda place: place[1], number=False),
        Column("launches in a chain", lambda place: times[place]["launches"], "{:,.0f}".format),
        Column("in a chain (µs)", lambda place: times[place]["chain"], value_text),
        Column("by itself (µs)", lambda place: times[place]["alone"], value_text),
        *(_queue_column(name, heading, times) for name, heading in QUEUED.items()),
    )
    cases = dict.fromkeys(case for case, _ in found)
    places = [(case, arm) for case in cases for arm in real_arms(cell) if (case, arm) in found]
    note = (
        "A chain is waited for as a whole, and each of its launches attends with the output of "
        "the one before. What a launch that does nothing costs is part of every time; what the "
        "host takes to describe a launch, before it is waited for, is part of none."
    )
    return Table(columns, tuple(places), (note,))


def _times(seen: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    middle: dict[str, float | None] = {name: median(values) for name, values in seen.items()}
    chained = (middle["launches"] or 0) > 1
    middle["chain"] = middle["dispatch_us"] if chained else None
    middle["alone"] = middle["single_us" if chained else "dispatch_us"]
    return middle


def _queue_column(
    name: str, heading: str, times: Mapping[tuple[str, str], Mapping[str, float | None]]
) -> Column[tuple[str, str]]:
    return Column(heading, lambda place: times[place][name], value_text)


def _listed(value: Any) -> Sequence[float]:
    return value if isinstance(value, list) else [value]


def engine_table(cell: Json) -> Table[str] | None:
    """Lay out the counters that differ between arms, medians over runs, a row for each.

    None for a kernel workload, which has no steps, and where there is but one arm.
    """
    arms = real_arms(cell)
    counted = {arm["name"]: arm["counters"] for arm in cell["arms"] if arm["name"] in arms}
    if len(counted) < 2 or not any(counts.get("steps.total") for counts in counted.values()):
        return None
    columns = (
        Column[str]("counter", lambda name: PER_STEP.get(name, name), number=False),
        *(Column(arm, _counted(counts)) for arm, counts in counted.items()),
    )
    note = "Medians over runs of what differs between arms; empty: nothing of the kind was counted."
    return Table(columns, (*_differing(counted), *_per_step(counted)), (note,))


def _differing(counted: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name in sorted({name for counts in counted.values() for name in counts}):
        values = {counts.get(name) or 0.0 for counts in counted.values()}
        if name not in LEFT_OUT and len(values) > 1:
            yield name


def _per_step(counted: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [name for name in PER_STEP if any(name in counts for counts in counted.values())]


def _counted(counts: Mapping[str, float]) -> Callable[[str], str]:
    """Return a column's value: a count of the arm, or a time per step."""

    def value(name: str) -> str:
        if name not in PER_STEP:
            return number(counts[name]) if counts.get(name) else ""
        steps = counts.get("steps.total")
        return f"{counts[name] / steps:.3f}" if steps and name in counts else ""

    return value


def number(value: float) -> str:
    """Write a count with separators, and what is no whole number with three digits or more."""
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def roofline_table(found: Sequence[RooflinePoint]) -> Table[RooflinePoint]:
    """Lay out work, speed and share of the binding limit; ``found``: one point at least."""
    limits = found[0].limits
    columns = [
        Column[RooflinePoint]("batch", lambda p: p.case, number=False),
        Column("arm", lambda p: p.arm, number=False),
        Column("MB", lambda p: p.bytes / 1e6, value_text),
        Column("MFLOP", lambda p: p.flops / 1e6, value_text),
        Column("FLOP/byte", lambda p: p.intensity, value_text),
        Column("GB/s", lambda p: p.gb_s, value_text),
        Column("GFLOP/s", lambda p: p.gflop_s, value_text),
    ]
    note = (
        "Bytes: what must move at least (each request's keys and values once, queries, output). "
        "Times: medians of the runs."
    )
    if limits is None:
        missing = "No limits were measured for this device, so there are no shares."
        return Table(tuple(columns), tuple(found), (note, missing))
    columns.append(Column("bound by", lambda p: p.bound, text_or_empty, number=False))
    columns.append(Column("share of limit", lambda p: p.share, "{:.0%}".format))
    known = f"{limits.text()} A small batch may live in the cache and exceed the reads."
    return Table(tuple(columns), tuple(found), (note, known))
