"""The waterfall from the baseline's time per output token to an arm's, part by part."""

from __future__ import annotations

from labkit.analysis.document.chart import Chart
from labkit.analysis.model.time_model import PART_NAMES, STALLS, ArmTime, TimeDivision
from labkit.analysis.number_format import signed_text, value_text

X_LABEL = "time per output token (µs)"
NOT_DIVIDED = "not divided"


def waterfall_steps(division: TimeDivision, arm: ArmTime) -> list[tuple[str, float]]:
    """Return the differences that lead from the baseline to the arm, in us, in order of a step.

    The parts' differences are estimated one by one and need not add up to that of the whole. What
    is left over is the last step, ``NOT_DIVIDED``.
    """
    parts = (one for one in arm.parts if one.part != STALLS)
    steps = [(PART_NAMES[one.part], one.difference_us or 0.0) for one in parts]
    rest = (arm.total.difference_us or 0.0) - sum(us for _, us in steps)
    return [*((name, us) for name, us in steps if us), (NOT_DIVIDED, rest)]


def waterfall_chart(baseline: str, division: TimeDivision, arm: ArmTime) -> Chart:
    """Return the chart: a bar for the baseline, one for each difference, and one for the arm."""
    steps, level = waterfall_steps(division, arm), division.total_us
    levels = [level]
    for _, us in steps:
        levels.append(levels[-1] + us)
    span = (max(levels) - min(levels)) or level * 0.01
    low = max(0.0, min(levels) - span)
    rows = (baseline, *(name for name, _ in steps), arm.arm)
    chart = Chart(
        f"from {baseline} to {arm.arm}", (low, max(levels) + 0.6 * span), (0.0, float(len(rows))),
        X_LABEL, rows=rows,
    )  # fmt: skip

    def bar(index: int, ends: tuple[float, float], style: str, text: str) -> None:
        y = len(rows) - index
        chart.bar((min(ends), max(ends)), (y - 0.8, y - 0.2), style, f"{rows[index]}: {text}")
        chart.text(max(ends), y - 0.5, text, dx=6)

    bar(0, (low, level), "reserved", value_text(level))
    for index, (_, us) in enumerate(steps):
        digits = 1 if abs(us) >= 10 else 2
        bar(index + 1, (levels[index], levels[index + 1]), "used", signed_text(us, digits))
    bar(len(rows) - 1, (low, levels[-1]), "reserved", value_text(levels[-1]))
    return chart
