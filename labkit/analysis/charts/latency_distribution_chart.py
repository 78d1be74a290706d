"""Distributions of latencies: for each latency a chart of the CDF over all requests, by arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import MEASURED_OUTCOMES
from labkit.analysis.document.chart import Chart
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.permutation_test import Floats
from labkit.records.record_notes_schema import RequestNote

LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token after the first"),
    ("itl_ms", "time between chunks"),
    ("e2e_ms", "time to the last token"),
)
CDF_POINTS = 101


def latency_charts(analysis: CellAnalysis) -> Iterator[tuple[str, Chart]]:
    """Yield a caption and the CDF of each latency over all requests, by arm, with the limits."""
    pools, styles = _pooled_latencies(analysis), arm_classes(analysis.cell)
    for key, name in LATENCIES:
        by_arm = {arm: pools[arm, key] for arm in styles if len(pools.get((arm, key), ()))}
        if not by_arm:
            continue
        limits = _limits(analysis, key)
        high = max(float(np.percentile(v, 99.5)) for v in by_arm.values())
        edge = max([high, *(1.1 * limit for limit in limits)]) or 1.0
        chart = Chart(
            title=name, x=(0.0, edge),
            y=(0.0, 100.0), x_label=f"{name} (ms)", y_label="values up to this time (%)",
            height=240, x_unit="ms", unit="%", link=key,
        )  # fmt: skip
        shares = np.linspace(0.0, 1.0, CDF_POINTS)
        for arm, values in by_arm.items():
            quantiles = np.minimum(np.quantile(values, shares), edge)
            points = list(zip(map(float, quantiles), map(float, 100 * shares), strict=True))
            chart.line(points, f"line {styles[arm][0]}", arm)
        for limit in limits:
            chart.limit(limit, f"limit {limit:g} ms")
        count = sum(map(len, by_arm.values()))
        caption = f"{name}: {CDF_POINTS} quantiles of {count:,} values of all runs"
        if beyond := max(float(np.mean(values > edge)) for values in by_arm.values()):
            share = significant_text(100 * beyond, 2)
            caption += f"; the slowest (at most {share} % of an arm's) are beyond the right edge"
        if analysis.data.keeps_stalls:
            caption += "; without stalls, which the times of the tables include"
        yield caption, chart


def _limits(analysis: CellAnalysis, key: str) -> list[float]:
    configs = (arm.config.get("workload") or {} for arm in analysis.data.arms)
    limits = {(config.get("limits") or {}).get(key) for config in configs}
    return sorted(float(limit) for limit in limits if limit)


def _pooled_latencies(analysis: CellAnalysis) -> dict[tuple[str, str], Floats]:
    """Return the latencies (ms) of all requests of all runs, by arm and key of ``LATENCIES``."""
    pools: dict[tuple[str, str], list[float]] = {}
    for record in (r for r in analysis.data.records if r.outcome in MEASURED_OUTCOMES):
        for request in (r for c in record.cases for r in c.known_notes.get("requests") or ()):
            for key, _ in LATENCIES:
                pools.setdefault((record.arm, key), []).extend(_latencies(request, key))
    return {key: np.array(values, np.float64) for key, values in pools.items()}


def _latencies(request: RequestNote, key: str) -> Sequence[float]:
    """Return a request's latencies; its TPOT is that of the metric: see :mod:`.serving_metrics`."""
    if key == "tpot_ms":
        first, untimed = request.get("first_chunk", 1), request.get("untimed_tokens", 0)
        later = (request.get("output_tokens") or 0) - untimed - first
        ends = request.get("e2e_ms"), request.get("ttft_ms")
        if later < 1 or ends[0] is None or ends[1] is None:
            return ()
        return [(ends[0] - ends[1]) / later]
    value: Any = request.get(key)
    values: Sequence[float] = value if isinstance(value, list) else [value]
    return () if value is None else values
