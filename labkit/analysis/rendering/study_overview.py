"""What a report says of all cells together, machine by machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.host_groups import host_groups
from labkit.analysis.latency_throughput import LoadCurve, load_curves
from labkit.analysis.rendering.request_outcome_tables import (
    LATENCY_THROUGHPUT_STEM,
    latency_throughput_chart,
    latency_throughput_table,
)
from labkit.analysis.rendering.tables import Table, cells_table


@dataclass(frozen=True)
class Overview:
    """One machine's cells: their table (None: there is one cell), and curves over them.

    ``machine``: None where the study has one only. ``stem``: of the curves' picture.
    """

    machine: str | None
    cells: Table[Any] | None
    curves: Sequence[LoadCurve]
    stem: str

    @property
    def loads(self) -> Table[Any] | None:
        """The curves as a table; None without any."""
        return latency_throughput_table(self.curves)

    @property
    def chart(self) -> str:
        """The curves as an ``<svg>``; empty without any."""
        return latency_throughput_chart(self.curves) if self.curves else ""


def overviews(study: Mapping[str, Any], analyses: Sequence[CellAnalysis]) -> list[Overview]:
    """Return what stands above the cells."""
    found = host_groups(analyses)
    return [
        Overview(
            machine.name if len(found) > 1 else None,
            cells_table(study, machine.cells) if len(analyses) > 1 else None,
            load_curves([analyses[index] for index in machine.cells]),
            LATENCY_THROUGHPUT_STEM if number == 0 else f"{LATENCY_THROUGHPUT_STEM}-{number + 1}",
        )
        for number, machine in enumerate(found)
    ]
