"""Tables that kernel workloads have besides times: what dispatches did, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.analysis.formatting import value_text
from labkit.analysis.rendering.roofline import points
from labkit.analysis.rendering.tables import Column, Line, Table
from labkit.analysis.sentences import real_arms
from labkit.records import Record

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
