"""The top of a study's report: for each machine, a table of its cells and its load curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from labkit.analysis.rendering.table_model import Column, Table

Json = Mapping[str, Any]


@dataclass(frozen=True)
class MachineOverview:
    """The cells that one machine ran.

    Parameters
    ----------
    machine
        The machine's name. None if the study has only one machine.
    cells
        The table of the machine's cells. None if the study has only one cell.
    curves
        Load curves over the machine's cells.
    stem
        Name of the curves' picture without the extension.
    """

    machine: str | None
    cells: Table[Any] | None
    curves: Sequence[LoadCurve]
    stem: str

    @property
    def loads(self) -> Table[Any] | None:
        """The load curves as a table, or None if there are no curves."""
        return latency_throughput_table(self.curves)

    @property
    def chart(self) -> str:
        """The load curves as an ``<svg>``, or an empty string if there are no curves."""
        return latency_throughput_chart(self.curves) if self.curves else ""


def machine_overviews(
    study: Mapping[str, Any], analyses: Sequence[CellAnalysis]
) -> list[MachineOverview]:
    """Return one overview per machine, in the order of their first cells."""
    groups = host_groups(analyses)
    stem = LATENCY_THROUGHPUT_STEM
    return [
        MachineOverview(
            group.name if len(groups) > 1 else None,
            cells_table(study, group.cells) if len(analyses) > 1 else None,
            load_curves([analyses[index] for index in group.cells]),
            stem if number == 1 else f"{stem}-{number}",
        )
        for number, group in enumerate(groups, start=1)
    ]


def cells_table(study: Json, indices: Iterable[int]) -> Table[tuple[int, Json]]:
    """Return the study's cells at ``indices`` with their answers and gates."""
    columns: tuple[Column[tuple[int, Json]], ...] = (
        Column("cell", lambda c: c[1]["cell"], numeric=False, link=lambda c: f"#cell{c[0]}"),
        Column("answer", lambda c: c[1]["answer"], numeric=False),
        Column("gates", lambda c: c[1]["gates"], gates_text, numeric=False),
    )
    return Table(columns, tuple((i, study["cells"][i]) for i in indices), prose=True)


def gates_text(gates: Mapping[str, str]) -> str:
    """Return all gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {status}" for name, status in gates.items())
