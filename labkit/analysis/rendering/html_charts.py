"""Charts of the HTML report: effects with intervals, runs in order, drift, latency CDFs."""

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
from labkit.analysis.rendering.results_table import verdict_text
from labkit.analysis.rendering.svg_elements import SvgChart, padded_range
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.verdict_sentences import row_name

Json = Mapping[str, Any]
LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "time between chunks"),
    ("e2e_ms", "time to the last token"),
)
CDF_POINTS = 101


def effects_chart(cell: Json) -> str | None:
    """Return a forest plot of the primary effects with their intervals and the shaded margin.

    None if no effect is known.
    """
    lines = [
        (row, c)
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
        x=padded_range([*known, -margin, margin]),
        y=(0.0, float(len(lines))),
        x_label=f"difference from {cell['arms'][0]['name']} (%), margin shaded",
        height=22 * len(lines) + 62,
        left=min(
            400, 16 + round(8.6 * max(len(f"{row_name(row)}, {c['arm']}") for row, c in lines))
        ),
    )
    chart.band(-margin, margin, "margin")
    chart.axes(y_ticks=False)
    chart.line([(0.0, 0.0), (0.0, float(len(lines)))], "zero")
    styles = arm_classes(cell)
    for i, (row, c) in enumerate(lines):
        y = len(lines) - i - 0.5
        style, mark = styles[c["arm"]]
        chart.text(chart.left - 8, chart.py(y), f"{row_name(row)}, {c['arm']}")
        if c["ci_low_pct"] is not None:
            chart.line([(c["ci_low_pct"], y), (c["ci_high_pct"], y)], f"line {style}")
        word = verdict_text(row, c["verdict"])
        chart.dot(c["effect_pct"], y, style, mark, f"{c['effect_pct']:+.2f} %, {word}")
    return chart.svg()


def runs_chart(
    cell: Json, row: Json, positions: Mapping[str, int], record_folder: str
) -> str | None:
    """Return a chart of a row's value in every run, in run order, or None if no run has a value.

    Dots link to the records below ``record_folder``.
    """
    values = [run["value"] for arm in row["arms"].values() for run in arm["runs"]]
    if not values:
        return None
    total = sum(len(arms) for arms in cell["design"]["order"])
    chart = SvgChart(
        title=f"runs of {row_name(row)}",
        x=(0.5, total + 0.5),
        y=padded_range([scaled(v, row["unit"]) for v in values]),
        x_label="run, in the order it was run (blocks shaded)",
        y_label=f"{row['metric']} ({unit_name(row['unit'])})",
    )
    _shade_blocks(chart, cell)
    chart.axes()
    for arm, (style, mark) in arm_classes(cell).items():
        summary = row["arms"][arm]
        if summary["n"]:
            median = scaled(summary["median"], row["unit"])
            chart.line([(0.5, median), (total + 0.5, median)], f"median {style}")
        for run in summary["runs"]:
            chart.dot(
                positions[run["file"]],
                scaled(run["value"], row["unit"]),
                style,
                mark,
                f"{run['file']}: {value_text(run['value'], row['unit'])}",
                f"{record_folder}{run['file']}",
            )
    return chart.svg()


def _shade_blocks(chart: SvgChart, cell: Json) -> None:
    start = 0
    for block, arms in enumerate(cell["design"]["order"]):
        if block % 2:
            chart.band(start + 0.5, start + len(arms) + 0.5, "block")
        start += len(arms)


def drift_chart(analysis: CellAnalysis) -> str | None:
    """Return a chart of every run's deviation from its arm's median, averaged over primary rows.

    The machine probe's deviation from its median is drawn with it. None with fewer than two runs.
    """
    cell = analysis.json
    positions = run_positions(cell)
    deviations: dict[int, list[float]] = {}
    for row in cell["rows"]:
        if not row["primary"]:
            continue
        for arm in row["arms"].values():
            for run in arm["runs"]:
                if run["value"] > 0 and arm["median"] > 0:
                    deviation = 100 * math.log(run["value"] / arm["median"])
                    deviations.setdefault(positions[run["file"]], []).append(deviation)
    metric = [(float(x), float(np.mean(v))) for x, v in sorted(deviations.items())]
    probe = _probe_line(analysis, positions)
    if len(metric) < 2:
        return None
    total = sum(len(arms) for arms in cell["design"]["order"])
    chart = SvgChart(
        title="drift and probe",
        x=(0.5, total + 0.5),
        y=padded_range([y for _, y in [*metric, *probe]]),
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


def _probe_line(analysis: CellAnalysis, positions: Mapping[str, int]) -> list[tuple[float, float]]:
    probes = analysis.data.probe
    if not probes:
        return []
    median = float(np.median(list(probes.values())))
    points = [
        (float(positions[file]), 100 * (probes[r.block, r.position] - median))
        for r in analysis.data.records
        if (file := f"runs/{r.run}.json") in positions and (r.block, r.position) in probes
    ]
    return sorted(points)


def latency_charts(analysis: CellAnalysis) -> Iterator[tuple[str, str]]:
    """Yield each latency's name and the ``<svg>`` of its CDF over all requests, a line per arm."""
    pools = _pooled_latencies(analysis)
    styles = arm_classes(analysis.json)
    for key, name in LATENCIES:
        by_arm = {arm: pools[arm, key] for arm in styles if len(pools.get((arm, key), ()))}
        if not by_arm:
            continue
        high = max(float(np.percentile(v, 99.5)) for v in by_arm.values())
        chart = SvgChart(
            title=name, x=(0.0, high or 1.0), y=(0.0, 1.0), x_label=f"{name} (ms)",
            y_label="share of values", height=240,
        )  # fmt: skip
        chart.axes()
        shares = np.linspace(0.0, 1.0, CDF_POINTS)
        for arm, values in by_arm.items():
            quantiles = np.minimum(np.quantile(values, shares), high)
            points = list(zip(map(float, quantiles), map(float, shares), strict=True))
            chart.line(points, f"line {styles[arm][0]}")
        yield name, chart.svg()


def _pooled_latencies(analysis: CellAnalysis) -> dict[tuple[str, str], Floats]:
    """Return the latencies (ms) of all requests of all runs, by arm and key of ``LATENCIES``."""
    pools: dict[tuple[str, str], list[float]] = {}
    for record in analysis.data.records:
        if record.outcome not in MEASURED_OUTCOMES:
            continue
        for case in record.cases:
            for request in case.notes.get("requests") or ():
                for key, _ in LATENCIES:
                    value = request.get(key)
                    if value is not None:
                        values: Sequence[float] = value if isinstance(value, list) else [value]
                        pools.setdefault((record.arm, key), []).extend(values)
    return {key: np.array(values, np.float64) for key, values in pools.items()}
