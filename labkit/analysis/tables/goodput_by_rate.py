"""Goodput by rate: the table and the chart of the share of requests within the limits."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import ChartPart
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.number_format import share_pct_text
from labkit.analysis.statistics.load_capacity import LoadCounts
from labkit.analysis.studies.serving_capacity import ServingCapacity

CapacityLine = tuple[ServingCapacity, LoadCounts]


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
    return Table(columns, lines, (_note(capacities),))


def _pct(share: float) -> str:
    """Write a share in percent, with two decimals from 99.9 on: a target may be 99.99 %."""
    return share_pct_text(share, 2 if 0.999 <= share < 1 else 1)


def _note(capacities: Sequence[ServingCapacity]) -> str:
    confidence = f"{100 * (1 - max(capacity.alpha for capacity in capacities)):.4g} %"
    return (
        f"The capacity's interval has {confidence} confidence, for these requests and arrival "
        "times on this machine, if the share does not rise with the rate. Each run is one sample, "
        "because requests of one run wait for each other."
    )


def capacity_chart(one: ServingCapacity) -> ChartPart:
    """Return a chart of an arm's goodput (the share of requests within the limits) by rate.

    The capacity's interval is shaded.
    """
    loads = one.loads
    place = {load.rate: float(index) for index, load in enumerate(loads)}
    chart = Chart(
        title=f"goodput of {one.name}",
        x=(-0.3, len(loads) - 0.7),
        y=(-4.0, 104.0),
        x_label=f"{one.unit} (evenly spaced)",
        y_label="requests within the limits (%)",
        x_ticks=tuple((place[load.rate], f"{load.rate:g}") for load in loads),
    )
    low, high = one.capacity.at_least, one.capacity.below
    if low is not None or high is not None:
        ends = (place.get(low or -1.0, -0.3), place.get(high or -1.0, len(loads) - 0.7))
        chart.band(*ends, "margin")
    target = 100 * one.target
    chart.line([(-0.3, target), (len(loads) - 0.7, target)], "limit")
    chart.text(-0.3, target, f"target {target:g} %", dx=6, dy=-9)
    chart.line([(place[load.rate], 100 * load.share) for load in loads], "line arm0")
    for load in loads:
        ends = load.share_interval(one.alpha)
        chart.line([(place[load.rate], 100 * end) for end in ends], "line arm0")
        tip = f"{one.name}, {load.rate:g} {one.unit}: {_pct(load.share)} % within the limits"
        chart.dot(place[load.rate], 100 * load.share, "arm0", "circle", tip)
    return ChartPart(chart, f"{one.sentence} Shaded: the capacity's interval.")
