"""Whether arms keep the limits of quality (``ablation.claims.quality``) fixed before the study.

An arm keeps a limit if the metric's whole interval lies inside the limit. It breaks the limit if
the whole interval lies outside. Otherwise the study cannot decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from labkit.analysis.comparison.text_quality import INTERVAL_KEYS, TextQuality
from labkit.analysis.model.cell_model import ArmQuality
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.block_jackknife import Interval


@dataclass(frozen=True)
class QualityMetric:
    """A metric that can have a limit: the largest value allowed if ``is_upper``, else the least."""

    value: Callable[[TextQuality], Interval]
    is_upper: bool


QUALITY_METRICS: Mapping[str, QualityMetric] = {
    "kl_mean": QualityMetric(lambda quality: quality.kl_mean, True),
    "perplexity_ratio": QualityMetric(lambda quality: quality.perplexity_ratio, True),
    "top1_agreement": QualityMetric(lambda quality: quality.top1_agreement, False),
}


def limit_fields(quality: ArmQuality | None) -> dict[str, float | None]:
    """Return an arm's quality as flat fields: ``kl_mean``, ``kl_mean_low``, ``kl_mean_high``, ...

    If ``quality`` is None, every field is None.
    """
    return {
        name + suffix: None if quality is None else getattr(quality.metrics[name], key)
        for name in QUALITY_METRICS
        for key, suffix in zip(INTERVAL_KEYS, ("", "_low", "_high"), strict=True)
    }


def broken_limits(quality: TextQuality, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield a phrase for each limit that the arm breaks, or that its interval leaves undecided."""
    for name, limit in limits.items():
        metric = QUALITY_METRICS[name]
        interval = metric.value(quality)
        bound = f"{'at most' if metric.is_upper else 'at least'} {limit:g}"
        if interval.low is None or interval.high is None:
            yield f"{name} is not decided: too few windows for an interval"
            continue
        extent = (
            f"{significant_text(interval.estimate, 4)} ({significant_text(interval.low, 4)} to "
            f"{significant_text(interval.high, 4)})"
        )
        inside, outside = interval.high <= limit, interval.low > limit
        if not metric.is_upper:
            inside, outside = interval.low >= limit, interval.high < limit
        if outside:
            yield f"{name} is {extent}, and must be {bound}"
        elif not inside:
            yield f"{name} is not decided: {extent} reaches across {bound}; score more windows"
