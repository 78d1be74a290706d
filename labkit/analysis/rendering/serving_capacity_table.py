"""The table of a capacity: the share of requests within the limits at every rate."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.rendering.table_model import Column, Table
from labkit.analysis.serving_capacity import ServingCapacity
from labkit.analysis.statistics.load_capacity import LoadCounts

CapacityLine = tuple[ServingCapacity, LoadCounts]


def capacity_table(capacities: Sequence[ServingCapacity]) -> Table[CapacityLine] | None:
    """Return the requests within the limits of every arm at every rate; None without capacities."""
    lines = tuple((capacity, load) for capacity in capacities for load in capacity.loads)
    if not lines:
        return None

    def interval(line: CapacityLine) -> str:
        low, high = line[1].share_interval(line[0].alpha)
        return f"{100 * low:.1f} to {100 * high:.1f} %"

    columns: tuple[Column[CapacityLine], ...] = (
        Column("arm", lambda line: line[0].arm, numeric=False),
        Column("requests/s", lambda line: f"{line[1].rate:g}"),
        Column("runs", lambda line: len(line[1].good)),
        Column("requests", lambda line: f"{line[1].requests.sum():,.0f}"),
        Column("within the limits", lambda line: f"{100 * line[1].share:.1f} %"),
        Column("interval", interval),
    )
    return Table(columns, lines, (_note(capacities),))


def _note(capacities: Sequence[ServingCapacity]) -> str:
    confidence = f"{100 * (1 - max(capacity.alpha for capacity in capacities)):g} %"
    return (
        f"The capacity's limits have {confidence} confidence, for these requests and arrival times "
        "on this machine, if the share does not rise with the rate. The run is the unit: requests "
        "of one run wait for each other."
    )
