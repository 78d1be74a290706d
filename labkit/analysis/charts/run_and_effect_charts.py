"""Charts of runs and effects: effects, differences by block, runs in order, drift."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.document.chart import ROW_HEIGHT, Chart, padded_range
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    PictureFile,
    ReportPart,
    section,
)
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import magnitude_text, percent_text, scaled, unit_name

ARM_HEIGHT = 13  # per arm, in a row with several arms
MAX_ROWS = 40  # the table shows the intervals of all rows


def pairs_chart(cell: Cell, row: Row, metric_row: MetricRow) -> Chart | None:
    """Return a chart of every arm's difference from the baseline in each block of a row.

    The estimated effects and their intervals are drawn on the right. None if no block is complete.
    """
    baseline, runs = cell.baseline, cell.design.runs_per_block
    found = {
        arm: pairs
        for arm in arm_classes(cell)
        if arm != baseline and (pairs := paired_differences(metric_row, arm, baseline, runs))
    }
    if not found:
        return None
    blocks = {block for pairs in found.values() for block in pairs}
    total = max(len(cell.design.order), max(blocks) + 1)
    effects = {c.arm: c for c in row.comparisons if c.arm in found}
    margin = cell.design.margin_pct
    known = [v for pairs in found.values() for v in pairs.values()]
    known += [pct for c in effects.values() for pct in c.known_pct]
    step = max(1, -(-total // 12))
    ticks = [(block + 1.0, str(block)) for block in range(0, total, step)]
    chart = Chart(
        title=f"differences by block of {cell.row_name(row)}",
        x=(0.5, total + 1.9),
        y=padded_range([*known, -margin, margin]),
        x_label="block; on the right the effect with its interval",
        y_label=f"{row.metric}, from {baseline} (%)",
        x_ticks=(*ticks, (total + 1.15, "all")),
        x_names=(*(f"block {block}" for block in range(total)), "all blocks"),
        unit="%",
        signed=True,
        link="block",
    )
    chart.band(-margin, margin, "margin", across=True)
    chart.line([(0.5, 0.0), (total + 1.9, 0.0)], "zero")
    _draw_pairs(chart, cell, found)
    _draw_estimates(chart, cell, effects, total + 1.15)
    return chart


def _draw_pairs(chart: Chart, cell: Cell, by_arm: Mapping[str, Mapping[int, float]]) -> None:
    styles, middle = arm_classes(cell), (len(by_arm) - 1) / 2
    for place, (arm, by_block) in enumerate(by_arm.items()):
        style, mark = styles[arm]
        shift = (place - middle) * min(0.12, 0.6 / len(by_arm))
        points = [(block + 1.0 + shift, value) for block, value in by_block.items()]
        chart.dots(points, style, mark, arm)


def _draw_estimates(chart: Chart, cell: Cell, effects: Mapping[str, Comparison], x: float) -> None:
    styles, middle = arm_classes(cell), (len(effects) - 1) / 2
    for place, (arm, c) in enumerate(effects.items()):
        style, mark = styles[arm]
        at = x + (place - middle) * min(0.25, 0.6 / len(effects))
        if c.ci_pct is not None:
            chart.line([(at, end) for end in c.ci_pct], f"line {style}", arm)
        if c.effect_pct is not None:
            chart.dots([(at, c.effect_pct)], style, mark, arm)


def runs_chart(cell: Cell, row: Row, record_folder: str) -> Chart | None:
    """Return a row's values in run order, linked to ``record_folder``; None if no run has one."""
    values = [run.value for arm in row.arms.values() for run in arm.runs]
    if not values:
        return None
    total, positions = cell.last_position, cell.run_positions
    chart = Chart(
        title=f"runs of {cell.row_name(row)}",
        x=(0.5, total + 0.5),
        y=padded_range([scaled(v, row.unit) for v in values]),
        x_label="run, in the order it was run (blocks shaded)",
        y_label=f"{row.metric} ({unit_name(row.unit)})",
        x_names=_run_names(positions, total),
        unit=row.unit,
        record_folder=record_folder,
        link="run",
    )
    _shade_blocks(chart, cell)
    for arm, (style, mark) in arm_classes(cell).items():
        summary = row.arms[arm]
        if summary.median is not None:
            median = scaled(summary.median, row.unit)
            chart.line([(0.5, median), (total + 0.5, median)], f"median {style}", arm)
        points = [(float(positions[run.file]), scaled(run.value, row.unit)) for run in summary.runs]
        if points:
            chart.dots(points, style, mark, arm)
    return chart


def _run_names(positions: Mapping[str, int], total: int) -> tuple[str, ...]:
    """Return the names of the runs by position; empty where a run has no value."""
    names = {at: file.removeprefix("runs/").removesuffix(".json") for file, at in positions.items()}
    return tuple(names.get(at, "") for at in range(1, total + 1))


def _shade_blocks(chart: Chart, cell: Cell) -> None:
    start = 0
    for block, arms in enumerate(cell.design.order):
        if block % 2:
            chart.band(start + 0.5, start + len(arms) + 0.5, "block")
        start += len(arms)


def drift_chart(analysis: CellAnalysis) -> Chart | None:
    """Return a chart of every run's deviation from its arm's median, averaged over primary rows.

    Up is worse: the sign of a row in which higher is better is changed, so that a slower machine
    moves all rows, and its probe, the same way. The probe's deviation from its median is drawn
    with them. None with fewer than two runs.
    """
    cell = analysis.cell
    positions = cell.run_positions
    deviations: dict[int, list[float]] = {}
    for row in cell.primary_rows:
        sign = -100 if row.better == "higher" else 100
        for arm in row.arms.values():
            for run in arm.runs:
                if run.value > 0 and arm.median:
                    deviation = sign * math.log(run.value / arm.median)
                    deviations.setdefault(positions[run.file], []).append(deviation)
    metric = [(float(x), float(np.mean(v))) for x, v in sorted(deviations.items())]
    probe = _probe_line(analysis, positions)
    if len(metric) < 2:
        return None
    total = cell.last_position
    # Times need no direction: a longer one is a higher one.
    direction = ", up is worse" if any(r.better == "higher" for r in cell.primary_rows) else ""
    chart = Chart(
        title="drift and probe",
        x=(0.5, total + 0.5),
        y=padded_range([y for _, y in [*metric, *probe]]),
        x_label="run, in the order it was run (blocks shaded)",
        y_label=f"from the arm's median (%){direction}",
        height=220,
        x_names=_run_names(positions, total),
        unit="%",
        signed=True,
        link="run",
    )
    _shade_blocks(chart, cell)
    chart.line(metric, "line series0", "runs")
    if probe:
        chart.line(probe, "line dashed series1", "probe")
    return chart


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


def paired_differences(row: MetricRow, arm: str, baseline: str, runs: int) -> dict[int, float]:
    """Return an arm's differences from the baseline by block, in percent.

    A difference comes from the mean log values of the arm's and the baseline's runs, or from the
    median over rounds if arms were interleaved. Blocks without comparable values are left out.
    ``runs``: the number of runs of each arm in a complete block.
    """
    row = row.pair(baseline, arm)
    if row.metric is None or row.skipped is not None or row.is_computed or not row.comparable:
        return {}
    # From 0, no difference has a percentage.
    blocks = () if row.is_zero(baseline) else complete_blocks(row, (baseline, arm), runs)
    if not blocks:
        return {}
    base, other = (log_values(row, name, blocks).mean(axis=1) for name in (baseline, arm))
    differences = map(row.to_percent, map(float, other - base))
    return dict(zip(blocks, differences, strict=True))


def variation_sentence(
    row: MetricRow, baseline: str, arm: str, differences: Collection[float]
) -> str | None:
    """Return a sentence with the range of the baseline's runs and the range of the differences.

    None if there are fewer than two blocks, or a run of the baseline has the value 0.
    """
    values = [run.value for run in row.arms.get(baseline, ())]
    if len(values) < 2 or len(differences) < 2 or min(values) <= 0.0:
        return None
    runs_pct = 100.0 * (max(values) / min(values) - 1.0)
    points = max(differences) - min(differences)
    return (
        f"runs of {baseline} lie up to {magnitude_text(runs_pct)} % apart, the differences of "
        f"{arm} within blocks {magnitude_text(points)} points"
    )


def effects_chart(cell: Cell) -> Chart | None:
    """Return a forest plot of the first ``MAX_ROWS`` primary effects; None if none is known."""
    primary = cell.primary_rows
    rows = [r for r in primary if any(c.effect_pct is not None for c in r.comparisons)]
    if not rows:
        return None
    shown = rows[:MAX_ROWS]
    margin = cell.design.margin_pct
    known = [pct for row in shown for c in row.comparisons for pct in c.known_pct]
    arms = len(cell.arms) - 1
    chart = Chart(
        title="effects with their intervals",
        x=padded_range([*known, -margin, margin]),
        y=(0.0, float(len(shown))),
        x_label=f"difference from {cell.baseline} (%), margin shaded",
        rows=tuple(map(cell.row_name, shown)),
        row_height=max(ROW_HEIGHT, ARM_HEIGHT * arms + 8),
    )
    chart.band(-margin, margin, "margin")
    chart.line([(0.0, 0.0), (0.0, float(len(shown)))], "zero")
    for i, row in enumerate(shown):
        _draw_effects(chart, cell, row, len(shown) - i - 0.5)
    if len(rows) > len(shown):
        chart.thinned.append(
            f"the first {len(shown)} of {len(rows):,} rows are drawn; the table has the intervals "
            "of all rows"
        )
    return chart


def _draw_effects(chart: Chart, cell: Cell, row: Row, middle: float) -> None:
    styles, step = arm_classes(cell), ARM_HEIGHT / chart.row_height
    arms = [arm for arm in styles if arm != cell.baseline]
    for place, arm in enumerate(arms):
        c = row.comparison(arm)
        if c is not None and c.effect_pct is not None:
            y = middle + ((len(arms) - 1) / 2 - place) * step
            effect = f"{percent_text(c.effect_pct)}, {verdict_word(row, c.verdict)}"
            tip = f"{cell.row_name(row)}, {arm}: {effect}"
            chart.effect(c.effect_pct, c.ci_pct, y, styles[arm], tip, arm)


@section("Effects")
def effects_section(report: CellSource) -> Iterator[ReportPart]:
    """Show the effects as a chart."""
    chart = effects_chart(report.cell)
    if chart is not None:
        yield (part := ChartPart(chart))
        yield PictureFile(report.cell.stem("effects"), "Effects with their intervals", [part])
