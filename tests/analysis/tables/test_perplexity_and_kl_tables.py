"""Speed against quality: a point for each arm with both intervals, and the frontier."""

from dataclasses import replace

from planted_cells import planted_cell

from labkit.analysis.document.chart import Dots, Line
from labkit.analysis.document.svg_chart_renderer import chart_svg
from labkit.analysis.model.cell_model import ArmQuality
from labkit.analysis.statistics.text_window_intervals import Interval
from labkit.analysis.tables.perplexity_and_kl_tables import speed_quality_chart


def cell(speeds, qualities):
    """Return a cell; ``speeds``: effects with their limits (%), ``qualities``: mean KL, by arm."""
    ends = ("effect_pct", "ci_low_pct", "ci_high_pct")
    comparisons = [
        {"arm": arm, **dict(zip(ends, effect, strict=True))} for arm, effect in speeds.items()
    ]
    arms = [{"name": "base", "role": "baseline"}]
    arms += [{"name": arm, "role": "arm"} for arm in speeds]
    planted = planted_cell([{"metric": "total_tok_s", "comparisons": comparisons}], arms=arms)
    scored = [ArmQuality(arm, 32, 800, {"kl_mean": kl}) for arm, kl in qualities.items()]
    return replace(planted, quality=tuple(scored))


def marks(chart, kind):
    return [mark for mark in chart.marks if isinstance(mark, kind)]


def test_the_frontier_has_no_arm_that_another_exceeds_in_both():
    kl = {"base": 0.0, "late": 0.3, "faster": 0.4, "slow": 0.1, "fast": 0.2, "same": 0.0}
    effects = {"late": 5.0, "faster": 9.0, "slow": -1.0, "fast": 5.0, "same": -2.0, "unknown": None}
    chart = speed_quality_chart(
        cell(
            {arm: (effect, None, None) for arm, effect in effects.items()},
            {arm: Interval(mean, None, None) for arm, mean in kl.items()},
        )
    )
    tips = [tip for mark in marks(chart, Dots) for tip in mark.tips]
    on = {tip.partition(":")[0] for tip in tips if tip.endswith(", on the frontier")}
    assert len(tips) == 6 and on == {"base", "fast", "faster"}


def test_the_chart_has_both_intervals_and_names_the_frontier():
    kl = {"base": Interval(0.0, 0.0, 0.0), "lossy": Interval(0.098, 0.0918, 0.105)}
    chart = speed_quality_chart(cell({"lossy": (12.5, 10.0, 15.0)}, kl))
    assert [line.points for line in marks(chart, Line) if line.arm] == [
        ((0, 0), (0, 0)), ((0, 0), (0, 0)), ((10, 0.098), (15, 0.098)),
        ((12.5, 0.0918), (12.5, 0.105)),
    ]  # fmt: skip
    svg = chart_svg(chart)
    assert "lossy: +12.5%, KL 0.098 (0.0918 to 0.105) nats, on the frontier" in svg
    nearly = chart_svg(speed_quality_chart(cell({"lossy": (-0.001, -0.1, 0.1)}, kl)))
    assert "lossy: 0.00%, KL" in nearly
    assert svg.count("line arm") == 4 and ">lossy</text>" in svg


def test_the_baseline_alone_has_no_chart():
    kl = {"base": Interval(0.0, 0.0, 0.0), "lossy": Interval(0.1, None, None)}
    assert speed_quality_chart(cell({"lossy": (None, None, None)}, kl)) is None
