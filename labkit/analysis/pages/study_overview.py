"""The top of a study's report: for each machine, its cells, load curves and capacities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.charts.latency_throughput_chart import (
    LATENCY_THROUGHPUT_STEM,
    curve_keys,
    curve_notes,
    latency_throughput_chart,
    latency_throughput_table,
)
from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import ChartPart
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.number_format import share_pct_text, unit_name, value_text
from labkit.analysis.robustness.cells_by_host import host_groups
from labkit.analysis.statistics.load_capacity import LoadCounts
from labkit.analysis.studies.cell_summary import CellSummary, cell_labels
from labkit.analysis.studies.increasing_load import (
    LOAD_OPTIONS,
    LoadCurve,
    ServingCapacity,
    load_curves,
    serving_capacities,
)

CapacityLine = tuple[ServingCapacity, LoadCounts]
NOT_COMPARED = (
    "Medians, with quartiles over runs. Cells ran one after the other, so no test compares them: "
    "the machine may have changed in between. Options of engine and model are compared within "
    "random blocks if they are swept with a single arm (docs/sweeps.md)."
)


@dataclass(frozen=True)
class MachineOverview:
    """The cells that one machine ran."""

    machine: str | None  # its name; None if the study has only one machine
    cells: Table[Any] | None  # of the machine's cells; None if the study has only one cell
    curves: Sequence[LoadCurve]  # over the machine's cells
    stem: str  # of the curves' picture: its name without the extension
    # Of every arm; empty if the workload sets no target share of requests.
    capacities: Sequence[ServingCapacity] = ()

    @property
    def charts(self) -> list[ChartPart]:
        """The load curves and the capacities as charts."""
        curves = [self.load_chart] if self.curves else []
        return [*curves, *map(capacity_chart, self.capacities)]

    @property
    def load_chart(self) -> ChartPart:
        chart = latency_throughput_chart(self.curves)
        return ChartPart(chart, " ".join(curve_notes(self.curves)), curve_keys(self.curves))

    @property
    def tables(self) -> list[tuple[str, Table[Any]]]:
        """The tables of the charts, with their titles."""
        tables = (("Capacity", self.capacity), ("Throughput against latency", self.loads))
        return [(title, table) for title, table in tables if table is not None]

    @property
    def capacity(self) -> Table[Any] | None:
        return capacity_table(self.capacities)

    @property
    def loads(self) -> Table[Any] | None:
        return latency_throughput_table(self.curves)


def machine_overviews(
    cells: Sequence[CellSummary], links: Sequence[str] | None = None
) -> list[MachineOverview]:
    """Return one overview per machine, in the order of their first cells.

    ``links``: the target of each cell's link; None if the cells follow on the same page.
    """
    groups = host_groups([cell.entry.machine for cell in cells])
    stem, labels = LATENCY_THROUGHPUT_STEM, cell_labels(cells)
    targets = links or [f"#cell{index}" for index in range(len(cells))]
    lines = list(map(CellLine, targets, labels, cells))
    overviews = []
    for number, (host, indices) in enumerate(groups.items(), start=1):
        own = [cells[index] for index in indices]
        own_labels = cell_labels(own, LOAD_OPTIONS)
        overview = MachineOverview(
            machine=host if len(groups) > 1 else None,
            cells=cells_table([lines[i] for i in indices]) if len(cells) > 1 else None,
            curves=load_curves(own, own_labels),
            stem=stem if number == 1 else f"{stem}-{number}",
            capacities=serving_capacities(own, own_labels),
        )
        overviews.append(overview)
    return overviews


@dataclass(frozen=True)
class CellLine:
    """A cell in the table of cells: its link's target, and its label among the study's cells."""

    link: str
    label: str
    cell: CellSummary


def cells_table(lines: Sequence[CellLine]) -> Table[CellLine]:
    """Return a table of cells with answers and gates, and medians where nothing is compared."""
    values = _values([line.cell for line in lines])
    columns: tuple[Column[CellLine], ...] = (
        Column("cell", lambda c: c.label, numeric=False, link=lambda c: c.link),
        *values,
        Column("answer", lambda c: c.cell.entry.answer, numeric=False),
        Column("gates", lambda c: c.cell.entry.gates, gates_text, numeric=False),
    )
    return Table(columns, tuple(lines), (NOT_COMPARED,) if values else (), prose=True)


def _values(cells: Sequence[CellSummary]) -> list[Column[CellLine]]:
    """Return a column of medians and quartiles, or an empty list if the cells cannot share one.

    They can if no cell compares arms and every cell has one primary row, of the same metric.
    """
    primary = [cell.primary for cell in cells]
    metrics = {(row.metric, row.unit) for rows in primary for row in rows}
    compared = any(cell.findings.arms for cell in cells)
    if compared or len(metrics) != 1 or any(len(rows) != 1 for rows in primary):
        return []
    ((metric, unit),) = metrics

    def value(line: CellLine) -> str:
        (row,) = line.cell.primary
        arm = next(iter(row.arms.values()))  # the baseline
        quartiles = " to ".join(value_text(end, unit) for end in (arm.q1, arm.q3))
        return value_text(arm.median, unit) + (f" ({quartiles})" if arm.n > 1 else "")

    return [Column(f"{metric} ({unit_name(unit)})", value)]


def gates_text(gates: Mapping[str, str]) -> str:
    """Return all gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {status}" for name, status in gates.items())


def capacity_table(capacities: Sequence[ServingCapacity]) -> Table[CapacityLine] | None:
    """Return the share of requests within the limits by arm and rate; None without capacities."""
    lines = tuple((capacity, load) for capacity in capacities for load in capacity.loads)
    if not lines:
        return None
    units = {one.unit for one in capacities}

    def rate(line: CapacityLine) -> str:
        return f"{line[1].rate:g}" + (f" {line[0].unit}" if len(units) > 1 else "")

    def interval(line: CapacityLine) -> str:
        low, high = line[1].share_interval(line[0].alpha)
        return f"{_pct(low)} to {_pct(high)} %"

    columns: tuple[Column[CapacityLine], ...] = (
        Column("arm", lambda line: line[0].name, numeric=False),
        Column("rate" if len(units) > 1 else lines[0][0].unit, rate),
        Column("runs", lambda line: len(line[1].good)),
        Column("requests", lambda line: f"{line[1].requests.sum():,.0f}"),
        Column("within the limits", lambda line: f"{_pct(line[1].share)} %"),
        Column("interval", interval),
    )
    confidence = f"{100 * (1 - max(capacity.alpha for capacity in capacities)):.4g} %"
    note = (
        f"The capacity's interval has {confidence} confidence, for these requests and arrival "
        "times on this machine, if the share does not rise with the rate. Each run is one sample, "
        "because requests of one run wait for each other."
    )
    return Table(columns, lines, (note,))


def _pct(share: float) -> str:
    """Write a share in percent, with two decimals from 99.9 on: a target may be 99.99 %."""
    return share_pct_text(share, 2 if 0.999 <= share < 1 else 1)


def capacity_chart(one: ServingCapacity) -> ChartPart:
    """Return an arm's goodput (the share of requests within limits) by rate, capacity shaded."""
    loads = one.loads
    place = {load.rate: float(index) for index, load in enumerate(loads)}
    left, right = -0.3, len(loads) - 0.7
    chart = Chart(
        title=f"goodput of {one.name}",
        x=(left, right),
        y=(-4.0, 104.0),
        x_label=f"{one.unit} (evenly spaced)",
        y_label="requests within the limits (%)",
        x_ticks=tuple((place[load.rate], f"{load.rate:g}") for load in loads),
    )
    low, high = one.capacity.at_least, one.capacity.below
    if low is not None or high is not None:
        chart.band(place.get(low or -1.0, left), place.get(high or -1.0, right), "margin")
    target = 100 * one.target
    chart.line([(left, target), (right, target)], "limit")
    chart.text(left, target, f"target {target:g} %", dx=6, dy=-9)
    chart.line([(place[load.rate], 100 * load.share) for load in loads], "line arm0")
    for load in loads:
        ends = load.share_interval(one.alpha)
        chart.line([(place[load.rate], 100 * end) for end in ends], "line arm0")
        tip = f"{one.name}, {load.rate:g} {one.unit}: {_pct(load.share)} % within the limits"
        chart.dot(place[load.rate], 100 * load.share, "arm0", "circle", tip)
    return ChartPart(chart, f"{one.sentence} Shaded: the capacity's interval.")
