"""Small bars of effects with their intervals, drawn by the page's style sheet.

The HTML report shows them on the card with each cell's answer and in the matrix of metrics. A bar
is an ``<i class="ci">`` element; its lengths are custom properties in percent of its width. A
thousand bars cost a browser less than a thousand pictures, and they need no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high

from labkit.analysis.comparison.best_setting import setting_text
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.model.result_row import Comparison, EffectInPercent, Row
from labkit.analysis.number_format import interval_text, percent_text

MAX_ARMS = 6  # on a card
MAX_NAME = 24  # characters beside a bar
MAX_ROWS = 60  # of an arm on a card


@dataclass(frozen=True)
class IntervalScale:
    """The ends of the bars' axis, and the margin of equivalence, in percent of the baseline."""

    low: float
    high: float
    margin: float

    @classmethod
    def of(cls, effects: Iterable[EffectInPercent], margin: float) -> IntervalScale:
        """Return a scale that is wide enough for all effects and intervals and the margin."""
        known = [pct for effect in effects for pct in effect.known_pct]
        low, high = min([*known, -margin, 0.0]), max([*known, margin, 0.0])
        padding = 0.04 * (high - low)
        return cls(low - padding, high + padding, margin)

    def place(self, percent: float) -> float:
        """Return the position of a difference on the axis, in percent of the width."""
        return 100.0 * (percent - self.low) / (self.high - self.low)

    @property
    def style(self) -> str:
        """The axis' CSS properties: the positions of zero and of the margin's ends."""
        ends = self.place(-self.margin), self.place(self.margin)
        return f"--z:{self.place(0.0):.3g};--m:{ends[0]:.3g};--n:{ends[1]:.3g}"

    def bar_style(self, effect: EffectInPercent) -> str:
        """Return a bar's CSS properties: positions of its interval and effect; empty if unknown."""
        if effect.effect_pct is None:
            return ""
        dot = f"--e:{self.place(effect.effect_pct):.3g}"
        if effect.ci_pct is None:
            return dot
        low, high = map(self.place, effect.ci_pct)
        return f"--l:{low:.3g};--w:{high - low:.3g};{dot}"

    @property
    def ends(self) -> str:
        """The ends of the axis in words."""
        return f"{interval_text(self.low, self.high)} %"


@dataclass(frozen=True)
class ArmBars:
    """The effects of one arm on a card.

    ``style`` is the arm's style class and its mark. ``bars`` has the CSS properties of a bar for
    each row. ``text`` is the range of the effects, and whether the arm is invalid.
    """

    arm: str
    style: str
    bars: Sequence[str]
    text: str


@dataclass(frozen=True)
class CardBars:
    """The bars of a card, a line per arm, on one scale; ``metric`` names the better direction."""

    metric: str
    scale: IntervalScale
    arms: Sequence[ArmBars]
    several_rows: bool
    has_intervals: bool
    left_out: int

    @property
    def has_long_names(self) -> bool:
        """Whether names do not fit beside their bars."""
        return any(len(line.arm) > MAX_NAME for line in self.arms)

    @property
    def caption(self) -> str:
        interval = " with its interval" if self.has_intervals else ""
        one = f"the effect{interval}"
        what = "each dot is a row, numbers are their range" if self.several_rows else one
        more = f"; further arms in the table: {self.left_out}" if self.left_out else ""
        axis = f"axis {self.scale.ends}, margin ±{self.scale.margin:g} % shaded"
        return f"{self.metric}: {what}; {axis}{more}"


def card_bars(analysis: CellAnalysis) -> CardBars | None:
    """Return the arms' bars, one per row of the most important metric, the best arm first.

    A sweep has one bar, for its best setting. None if no effect is known.
    """
    cell, found = analysis.cell, dict[str, list[EffectInPercent]]()
    rows = [row for row in cell.primary_rows if row.metric is not None]
    measured: Row | BestInRow | None = rows[0] if rows else None
    if cell.sweep:
        measured = min(cell.best or (), key=lambda each: each.withheld is not None, default=None)
        if measured is not None and measured.effect_pct is not None:
            best, reference = (setting_text(str(x)) for x in (measured.best, measured.reference))
            found = {f"{best} against {reference}": [measured]}
    else:
        found = _effects([r for r in rows if r.metric == rows[0].metric], cell.treatment_arms)
    if not found:
        return None
    styles, shown = arm_classes(cell), list(found.items())[:MAX_ARMS]
    effects = [effect for _, own in shown for effect in own]
    scale = IntervalScale.of(effects, cell.design.margin_pct)
    lines = []
    for arm, own in shown:
        bars = [scale.bar_style(effect) for effect in own[:MAX_ROWS]]
        lines.append(ArmBars(arm, " ".join(styles.get(arm, ())), bars, _range_text(own)))
    several_rows = any(len(own) > 1 for _, own in shown)
    has_intervals = any(effect.ci_pct is not None for effect in effects)
    left_out = len(found) - len(shown)
    return CardBars(_metric_text(measured), scale, lines, several_rows, has_intervals, left_out)


def _metric_text(row: Row | BestInRow | None) -> str:
    """Return a row's metric and which direction is better: ``throughput, higher is better``."""
    if row is None:
        return ""
    label = row.definition.short_label
    return f"{label}, {row.better} is better" if row.better else label


def _effects(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, list[EffectInPercent]]:
    found: dict[str, list[EffectInPercent]] = {}
    for row in rows:
        for c in row.comparisons:
            if c.arm in arms and c.effect_pct is not None:
                found.setdefault(c.arm, []).append(c)
    sign = -1.0 if rows and rows[0].better == "higher" else 1.0

    def gain(arm: str) -> float:
        return median_high(sign * effect for effect in _sizes(found[arm]))

    return {arm: found[arm] for arm in sorted(found, key=gain)}


def _sizes(effects: Sequence[EffectInPercent]) -> list[float]:
    return sorted(one.effect_pct for one in effects if one.effect_pct is not None)


def _range_text(effects: Sequence[EffectInPercent]) -> str:
    sizes = _sizes(effects)
    low, high = percent_text(sizes[0]), percent_text(sizes[-1])
    text = low if low == high else f"{low.rstrip('%')} to {high}"
    invalid = all(isinstance(c, Comparison) and c.verdict == "invalid" for c in effects)
    return f"{text} (invalid)" if invalid else text
