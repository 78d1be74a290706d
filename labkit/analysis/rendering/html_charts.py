"""The charts of the HTML report: forest, runs in order, drift and probe, latency CDFs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import scaled, unit_name, value_text
from labkit.analysis.observations import MEASURED_OUTCOMES
from labkit.analysis.rendering.arm_styles import arm_classes
from labkit.analysis.rendering.matplotlib_figures import run_positions
from labkit.analysis.rendering.svg_elements import SvgChart, padded
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.verdict_sentences import row_name

Json = Mapping[str, Any]
LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "time between chunks"),
    ("e2e_ms", "time to the last token"),
)
CDF_POINTS = 101


def forest(cell: Json) -> str | None:
    """Draw every primary effect with its interval, the margin shaded; None without effects."""
    lines = [
        (row_name(row), c)
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["effect_pct"] is not None
    ]
    if not lines:
        return None
    keys = ("effect_pct", "ci_low_pct", "ci_high_pct")
    margin = float(cell["design"]["margin_pct"])
    known = [c[k] for _, c in lines for k in keys if c[k] is not None]
    chart = SvgChart(
        title="effects with their intervals",
        x=padded([*known, -margin, margin]),
        y=(0.0, float(len(lines))),
        x_label=f"difference from {cell['arms'][0]['name']} (%), margin shaded",
        height=22 * len(lines) + 62,
        left=min(400, 16 + round(8.6 * max(len(f"{name}, {c['arm']}") for name, c in lines))),
    )
    chart.band(-margin, margin, "margin")
    chart.axes(y_ticks=False)
    chart.line([(0.0, 0.0), (0.0, float(len(lines)))], "zero")
    styles = arm_classes(cell)
    for i, (name, c) in enumerate(lines):
        y = len(lines) - i - 0.5
        style, mark = styles[c["arm"]]
        chart.text(chart.left - 8, chart.py(y), f"{name}, {c['arm']}")
        if c["ci_low_pct"] is not None:
            chart.line([(c["ci_low_pct"], y), (c["ci_high_pct"], y)], f"line {style}")
        chart.dot(c["effect_pct"], y, style, mark, f"{c['effect_pct']:+.2f} %, {c['verdict']}")
    return chart.svg()


def runs_in_order(cell: Json, row: Json, order: Mapping[str, int], folder: str) -> str | None:
    """Draw every run of a row at its place in ``order``; dots link to the records."""
    values = [run["value"] for arm in row["arms"].values() for run in arm["runs"]]
    if not values:
        return None
    total = sum(len(arms) for arms in cell["design"]["order"])
    chart = SvgChart(
        title=f"runs of {row_name(row)}",
        x=(0.5, total + 0.5),
        y=padded([scaled(v, row["unit"]) for v in values]),
        x_label="run, in the order it was run (blocks shaded)",
        y_label=f"{row['metric']} ({unit_name(row['unit'])})",
    )
    _shade_blocks(chart, cell)
    chart.axes()
    for arm, (style, mark) in arm_classes(cell).items():
        found = row["arms"][arm]
        if found["n"]:
            median = scaled(found["median"], row["unit"])
            chart.line([(0.5, median), (total + 0.5, median)], f"median {style}")
        for run in found["runs"]:
            chart.dot(
                order[run["file"]],
                scaled(run["value"], row["unit"]),
                style,
                mark,
                f"{run['file']}: {value_text(run['value'], row['unit'])}",
                f"{folder}{run['file']}",
            )
    return chart.svg()


def _shade_blocks(chart: SvgChart, cell: Json) -> None:
    start = 0
    for block, arms in enumerate(cell["design"]["order"]):
        if block % 2:
            chart.band(start + 0.5, start + len(arms) + 0.5, "block")
        start += len(arms)


def drift(analysis: CellAnalysis) -> str | None:
    """Draw what arms leave over of the metric, and the probe, over the whole study."""
    cell = analysis.json
    order = run_positions(cell)
    rest: dict[int, list[float]] = {}
    for row in cell["rows"]:
        if not row["primary"]:
            continue
        for arm in row["arms"].values():
            for run in arm["runs"]:
                if run["value"] > 0 and arm["median"] > 0:
                    place = order[run["file"]]
                    rest.setdefault(place, []).append(100 * math.log(run["value"] / arm["median"]))
    metric = [(float(x), float(np.mean(v))) for x, v in sorted(rest.items())]
    probe = _probe_line(analysis, order)
    if len(metric) < 2:
        return None
    total = sum(len(arms) for arms in cell["design"]["order"])
    chart = SvgChart(
        title="drift and probe",
        x=(0.5, total + 0.5),
        y=padded([y for _, y in [*metric, *probe]]),
        x_label="run, in the order it was run (blocks shaded)",
        y_label="from the arm's median (%)",
        height=220,
    )
    _shade_blocks(chart, cell)
    chart.axes()
    chart.line(metric, "line arm0")
    if probe:
        chart.line(probe, "line dashed arm1")
    return chart.svg()


def _probe_line(analysis: CellAnalysis, order: Mapping[str, int]) -> list[tuple[float, float]]:
    probes = analysis.data.probe
    if not probes:
        return []
    middle = float(np.median(list(probes.values())))
    found = [
        (float(order[file]), 100 * (probes[r.block, r.position] - middle))
        for r in analysis.data.records
        if (file := f"runs/{r.run}.json") in order and (r.block, r.position) in probes
    ]
    return sorted(found)


def latency_cdfs(analysis: CellAnalysis) -> Iterator[tuple[str, str]]:
    """Draw each latency's distribution over all requests of an arm's runs: (title, chart)."""
    pools = _latency_pools(analysis)
    styles = arm_classes(analysis.json)
    for key, name in LATENCIES:
        lines = {arm: pools[arm, key] for arm in styles if len(pools.get((arm, key), ()))}
        if not lines:
            continue
        high = max(float(np.percentile(v, 99.5)) for v in lines.values())
        chart = SvgChart(
            title=name, x=(0.0, high or 1.0), y=(0.0, 1.0), x_label=f"{name} (ms)",
            y_label="share of values", height=240,
        )  # fmt: skip
        chart.axes()
        shares = np.linspace(0.0, 1.0, CDF_POINTS)
        for arm, values in lines.items():
            quantiles = np.minimum(np.quantile(values, shares), high)
            points = list(zip(map(float, quantiles), map(float, shares), strict=True))
            chart.line(points, f"line {styles[arm][0]}")
        yield name, chart.svg()


def _latency_pools(analysis: CellAnalysis) -> dict[tuple[str, str], Floats]:
    pools: dict[tuple[str, str], list[float]] = {}
    for record in analysis.data.records:
        if record.outcome not in MEASURED_OUTCOMES:
            continue
        for case in record.cases:
            for request in case.notes.get("requests") or ():
                for key, _ in LATENCIES:
                    value = request.get(key)
                    if value is not None:
                        many: Sequence[float] = value if isinstance(value, list) else [value]
                        pools.setdefault((record.arm, key), []).extend(many)
    return {key: np.array(values, np.float64) for key, values in pools.items()}
