"""The roofline as a picture: for the page, and as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from labkit.analysis.rendering.charts import arm_classes
from labkit.analysis.rendering.figures import arm_styles
from labkit.analysis.rendering.roofline import Point
from labkit.analysis.rendering.svg import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
X_LABEL = "intensity (FLOP per byte)"
Y_LABEL = "GFLOP/s"
ROOM = 0.1  # decades between the outermost points and the edges


def _ranges(found: Sequence[Point]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Give the exponents of 10 between which all points and the roof's corner lie."""
    x, y = [p.intensity for p in found], [p.gflop_s for p in found]
    limits = found[0].limits
    if limits is not None:
        x += [limits.sgemm_gflop_s / limits.read_gb_s]
        y += [limits.sgemm_gflop_s]
    return _exponents(x), _exponents(y)


def _exponents(values: Sequence[float]) -> tuple[float, float]:
    low, high = log10(min(values)), log10(max(values))
    return min(floor(low), low - ROOM), max(ceil(high), high + ROOM)


def _roof(found: Sequence[Point], x: tuple[float, float]) -> list[tuple[float, float]]:
    """Give the roof's points (intensity, GFLOP/s); empty without limits."""
    limits = found[0].limits
    if limits is None:
        return []
    corner = limits.sgemm_gflop_s / limits.read_gb_s
    places = (10 ** x[0], corner, 10 ** x[1])
    return [(p, min(p * limits.read_gb_s, limits.sgemm_gflop_s)) for p in places]


def roofline_chart(cell: Json, found: Sequence[Point]) -> str | None:
    """Draw the roofline for the page; None without points."""
    if not found:
        return None
    x, y = _ranges(found)
    chart = Chart("roofline", x, y, X_LABEL, Y_LABEL, height=340, powers=True)
    chart.axes()
    styles = arm_classes(cell)
    roof = [(log10(a), log10(b)) for a, b in _roof(found, x)]
    if roof:
        chart.line(roof, "zero")
    for p in found:
        style, mark = styles[p.arm]
        share = "" if p.share is None else f", {p.share:.0%} of the limit"
        tip = f"{p.case}, {p.arm}: {p.gflop_s:,.1f} GFLOP/s, {p.gb_s:,.1f} GB/s{share}"
        chart.dot(log10(p.intensity), log10(p.gflop_s), style, mark, tip)
    return chart.svg()


def roofline_figure(cell: Json, found: Sequence[Point]) -> Figure:
    """Draw the roofline with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    panel = figure.subplots()
    x, y = _ranges(found)
    roof = _roof(found, x)
    if roof:
        panel.plot(*zip(*roof, strict=True), color="black", linewidth=1.2, label="limit")
    for arm, (colour, mark) in arm_styles(cell).items():
        mine = [p for p in found if p.arm == arm]
        if mine:
            places = [p.intensity for p in mine], [p.gflop_s for p in mine]
            panel.plot(*places, mark, color=colour, markersize=5, label=arm)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(10 ** x[0], 10 ** x[1])
    panel.set_ylim(10 ** y[0], 10 ** y[1])
    panel.set_xlabel(X_LABEL)
    panel.set_ylabel(Y_LABEL)
    panel.legend(loc="lower right")
    return figure
