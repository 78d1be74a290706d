"""A row of a cell, which is one metric of one case: the arms' values and their comparisons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from labkit.analysis.model.dataclass_json import absent
from labkit.analysis.number_format import round_significant
from labkit.analysis.statistics.equivalence_test import Equivalence
from labkit.records.metric_registry import MetricDefinition, metric_definition

# Numbers of a comparison that are rounded in files.
ROUNDED = (
    "effect_pct", "ci_low_pct", "ci_high_pct", "level", "ci_raw_low_pct", "ci_raw_high_pct", "p",
    "p_adjusted", "mde_pct", "alpha_row", "sd", "as_measured_pct",
)  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """A metric's value in one run. ``file`` is the record's path within the cell."""

    file: str
    value: float


@dataclass(frozen=True)
class ArmValues:
    """An arm's runs in one row, with their median and quartiles; None without a run."""

    median: float | None = None
    q1: float | None = None
    q3: float | None = None
    n: int = 0
    runs: tuple[RunResult, ...] = ()


class EffectInPercent:
    """An effect in percent of the baseline, with its interval; unknown numbers are None."""

    effect_pct: float | None
    ci_low_pct: float | None
    ci_high_pct: float | None

    @property
    def ci_pct(self) -> tuple[float, float] | None:
        return _pair(self.ci_low_pct, self.ci_high_pct)

    @property
    def known_pct(self) -> list[float]:
        """The effect and the ends of its interval, as far as they are known."""
        numbers = (self.effect_pct, self.ci_low_pct, self.ci_high_pct)
        return [number for number in numbers if number is not None]


@dataclass(frozen=True)
class Comparison(EffectInPercent):
    """An arm compared with the baseline in one row, and the verdict; unknown numbers are None.

    ``effect_pct`` is above 0 if the metric is larger than the baseline's. The interval (``ci``) and
    ``p_adjusted`` belong to one test, adjusted over rows and arms: the interval is simultaneous and
    excludes 0 if and only if ``p_adjusted`` is at most alpha. The interval ``ci_raw`` and ``p``
    come from the test of this row alone, unadjusted. ``level`` is the confidence level of both
    intervals (0.95, or 0.99 at an interim look that spends 0.01). ``p_floor`` is the smallest
    possible ``p_adjusted``. ``mde_pct`` is the minimum detectable effect: 80 of 100 studies of this
    design would detect it if they tested the row at level ``alpha_row``. ``sd`` is the standard
    deviation between runs, on the log scale. ``wins`` is the number of blocks in which the arm is
    better. ``difference``, in the metric's unit, takes the place of effect and interval if they
    have no percentage, as from a baseline that is 0 in every run. ``as_measured_pct`` is the effect
    with stalls, or of the mean of all launches, if it lies outside the interval.

    The test of equivalence and the adjusted interval of ``difference`` are not in files.
    """

    arm: str
    baseline: str
    effect_pct: float | None = None
    ci_low_pct: float | None = None
    ci_high_pct: float | None = None
    level: float | None = None
    ci_raw_low_pct: float | None = None
    ci_raw_high_pct: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    p_floor: float | None = None
    mde_pct: float | None = None
    alpha_row: float | None = None
    sd: float | None = None
    wins: int | None = None
    blocks: int = 0
    verdict: str = "inconclusive"
    reason: str | None = None
    difference: float | None = absent()
    as_measured_pct: float | None = absent()
    equivalence: Equivalence | None = absent()
    difference_ci: tuple[float, float] | None = absent()

    def rounded(self) -> Comparison:
        """Return the comparison as files hold it."""
        numbers: dict[str, Any] = {name: round_significant(getattr(self, name)) for name in ROUNDED}
        return replace(self, equivalence=None, difference_ci=None, **numbers)

    @property
    def level_text(self) -> str:
        """The confidence level of the intervals: ``95 %``; empty if nothing is claimed."""
        return f"{100 * self.level:g} %" if self.level else ""

    @property
    def ci_raw_pct(self) -> tuple[float, float] | None:
        return _pair(self.ci_raw_low_pct, self.ci_raw_high_pct)

    def is_withheld(self, margin_pct: float) -> bool:
        """Return whether the row is inconclusive although its interval would decide it.

        Its word was withheld, as where slow launches or stalls may be the arm's own work.
        """
        if self.verdict != "inconclusive" or self.ci_pct is None:
            return False
        low, high = self.ci_pct
        return not low <= 0 <= high or max(-low, high) < margin_pct


def _pair(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


class CaseAndMetric(Protocol):
    """What names a row, in whatever form the row is."""

    @property
    def case(self) -> str:
        """The case; ``all`` if it is all requests."""

    @property
    def metric(self) -> str | None:
        """The metric, or None for a case without measurements."""


def row_name(row: CaseAndMetric, metrics: Collection[str | None]) -> str:
    """Return the name of a row among the rows of its cell, whose primary metrics are ``metrics``.

    It is the row's case, followed by the metric if the cell has several. The case ``all`` tells
    nothing, so a row of all requests is named by its metric.
    """
    if row.metric is None:
        return row.case
    if row.case == "all":
        return row.metric
    return f"{row.case}: {row.metric}" if len(metrics) > 1 else row.case


@dataclass(frozen=True)
class Row:
    """One metric of one case.

    For a skipped case, ``skipped`` is the reason, and ``metric`` is the primary metric of the
    measured rows (None if there are none). ``arms`` has the values of every arm of the cell.
    """

    case: str
    metric: str | None = None
    unit: str | None = None
    better: str | None = None
    primary: bool = False
    skipped: str | None = None
    arms: Mapping[str, ArmValues] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()

    @property
    def definition(self) -> MetricDefinition:
        return metric_definition(self.metric, self.unit)

    def comparison(self, arm: str | None) -> Comparison | None:
        return next((one for one in self.comparisons if one.arm == arm), None)

    def median(self, arm: str | None) -> float | None:
        values = self.arms.get(arm or "")
        return None if values is None else values.median
