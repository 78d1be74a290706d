"""Tables that kernel workloads have besides times: what dispatches did, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from labkit.analysis.numbers import value_text
from labkit.analysis.roofline import points
from labkit.analysis.sentences import real_arms
from labkit.analysis.table import Column, Line, Table
from labkit.experiment.record import Record

Json = Mapping[str, Any]
FIRST = (
    "attention.search_iterations",
    "attention.dependent_loads",
    "attention.surplus_threadgroups",
    "attention.kv_blocks_visited",
    "attention.bytes",
)
COUNTED = ("attention.search_iterations", "attention.surplus_threadgroups",
           "attention.kv_blocks_visited")  # fmt: skip
VARIES = "varies"
# What a record notes of launches in a queue, beside the metrics: heading by note.
QUEUED = {
    "empty_us": "empty, in a chain (µs)",
    "empty_single_us": "empty, by itself (µs)",
    "host_us": "described by the host (µs)",
}


def counters_table(cell: Json, records: Sequence[Record]) -> Table | None:
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
    columns = [Column("batch", number=False), Column("arm", number=False)]
    columns += [Column(_heading(name) + _origin(name)) for name in names]
    cases = dict.fromkeys(case for case, _ in found)
    lines = [
        Line((case, arm, *(_count(found[case, arm].get(name)) for name in names)), i, arm, None)
        for i, case in enumerate(cases)
        for arm in real_arms(cell)
        if found.get((case, arm))
    ]
    note = (
        "Per dispatch, the same on every machine with as many threads. Counted by the kernel "
        "itself; what is called computed follows from its plan on the host."
    )
    return Table(tuple(columns), tuple(lines), (note,))


def _origin(name: str) -> str:
    return "" if name in COUNTED else " (computed)"


def _heading(name: str) -> str:
    group, _, what = name.partition(".")
    words = what.replace("_", " ").replace("kv ", "KV ")
    return words if group == "attention" else f"{group.replace('_', '-')} {words}"


def _count(values: set[float] | None) -> str:
    if not values:
        return ""
    return VARIES if len(values) > 1 else f"{next(iter(values)):,.0f}"


def queue_table(cell: Json, records: Sequence[Record]) -> Table | None:
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
    names = ["launches in a chain", "in a chain (µs)", "by itself (µs)", *QUEUED.values()]
    columns = [Column("batch", number=False), Column("arm", number=False), *map(Column, names)]
    lines = [
        Line((name, arm, *_queued(found[name, arm])), index, arm, None)
        for index, name in enumerate(dict.fromkeys(name for name, _ in found))
        for arm in real_arms(cell)
        if (name, arm) in found
    ]
    note = (
        "A chain is waited for as a whole, and each of its launches attends with the output of "
        "the one before. What a launch that does nothing costs is part of every time; what the "
        "host takes to describe a launch, before it is waited for, is part of none."
    )
    return Table(tuple(columns), tuple(lines), (note,))


def _queued(seen: Mapping[str, Sequence[float]]) -> list[str]:
    middle = {name: median(values) for name, values in seen.items()}
    chained = middle["launches"] > 1
    alone = middle["single_us" if chained else "dispatch_us"]
    times = [middle["dispatch_us"] if chained else None, alone, *(middle[n] for n in QUEUED)]
    return [f"{middle['launches']:,.0f}", *map(value_text, times)]


def _listed(value: Any) -> Sequence[float]:
    return value if isinstance(value, list) else [value]


def roofline_table(cell: Json, records: Sequence[Record]) -> Table | None:
    """Lay out work, speed and share of the binding limit; None where the work is not noted."""
    found = points(cell, records)
    if not found:
        return None
    limits = found[0].limits
    names = ["MB", "MFLOP", "FLOP/byte", "GB/s", "GFLOP/s"]
    columns = [Column("batch", number=False), Column("arm", number=False), *map(Column, names)]
    if limits is not None:
        columns += [Column("bound by", number=False), Column("share of limit")]
    lines = []
    for index, p in enumerate(found):
        numbers = (p.bytes / 1e6, p.flops / 1e6, p.intensity, p.gb_s, p.gflop_s)
        cells = [p.case, p.arm, *map(value_text, numbers)]
        if p.share is not None:
            cells += [str(p.bound), f"{p.share:.0%}"]
        lines.append(Line(tuple(cells), index, p.arm, None))
    notes = [
        "Bytes: what must move at least (each request's keys and values once, queries, output). "
        "Times: medians of the runs."
    ]
    if limits is None:
        notes.append("No limits were measured for this device, so there are no shares.")
    else:
        notes.append(f"{limits.text()} A small batch may live in the cache and exceed the reads.")
    return Table(tuple(columns), tuple(lines), tuple(notes))
