"""What the engine of each arm counted, where arms differ: how they did the same work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from labkit.analysis.rendering.tables import Column, Line, Table
from labkit.analysis.sentences import real_arms

Json = Mapping[str, Any]
# Times, and counters of which others are the measure.
LEFT_OUT = ("step_ms", "device_ms", "host_ms", "attention.map_us", "peak_kv_bytes")
PER_STEP = {"host_ms": "host time per step (ms)", "device_ms": "model time per step (ms)"}


def engine_table(cell: Json) -> Table | None:
    """Lay out the counters that differ between arms, medians over runs, a row for each.

    None for a kernel workload, which has no steps, and where there is but one arm.
    """
    arms = real_arms(cell)
    counted = {arm["name"]: arm["counters"] for arm in cell["arms"] if arm["name"] in arms}
    if len(counted) < 2 or not any(counts.get("steps.total") for counts in counted.values()):
        return None
    lines = [
        Line((name, *values), index, None, None)
        for index, (name, values) in enumerate([*_differing(counted), *_per_step(counted)])
    ]
    columns = (Column("counter", number=False), *(Column(arm) for arm in counted))
    note = "Medians over runs of what differs between arms; empty: nothing of the kind was counted."
    return Table(columns, tuple(lines), (note,))


def _differing(counted: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, list[str]]]:
    for name in sorted({name for counts in counted.values() for name in counts}):
        values = [counts.get(name) or 0.0 for counts in counted.values()]
        if name not in LEFT_OUT and len(set(values)) > 1:
            yield name, [number(value) if value else "" for value in values]


def _per_step(counted: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, list[str]]]:
    for name, title in PER_STEP.items():
        if any(name in counts for counts in counted.values()):
            yield title, [_share(counts, name) for counts in counted.values()]


def _share(counts: Mapping[str, float], name: str) -> str:
    steps = counts.get("steps.total")
    return f"{counts[name] / steps:.3f}" if steps and name in counts else ""


def number(value: float) -> str:
    """Write a count with separators, and what is no whole number with three digits or more."""
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
