"""Bimodality: do runs fall into a fast and a slow mode, and does a mode favour an arm?

Runs of a slow mode are reported and never dropped: relaunching "until fast" would bias the result.
Each arm's median is subtracted from its runs, so that an effect is not mistaken for a mode. The
widest gap between neighbouring values splits the runs into two modes if it is far wider than the
standard deviation within each mode. R. A. Fisher's exact test (scipy) tests whether an arm and the
baseline differ in their share of runs above the gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from labkit.analysis.statistics.permutation_test import Floats

MIN_GAP_IN_SDS = 3.0
MIN_RUNS_PER_MODE = 3


@dataclass(frozen=True)
class Bimodality:
    """Two modes, ``gap_pct`` percent apart.

    For each arm, ``above_gap`` is the number of its runs in the upper mode, ``total`` the number of
    all its runs, and ``fisher_p`` the p of its comparison with the baseline.
    """

    above_gap: Mapping[str, int]
    total: Mapping[str, int]
    gap_pct: float
    fisher_p: Mapping[str, float]


def find_modes(values: Mapping[str, Floats], baseline: str) -> Bimodality | None:
    """Split the log values of all arms' runs into two modes; None if there is one, or few runs."""
    centred = {arm: v - np.median(v) for arm, v in values.items() if len(v)}
    pool = np.sort(np.concatenate(list(centred.values()))) if centred else np.empty(0)
    if baseline not in centred or len(pool) < 2 * MIN_RUNS_PER_MODE + 2:
        return None
    gaps = np.diff(pool)
    first = MIN_RUNS_PER_MODE - 1
    cut = int(np.argmax(gaps[first : len(gaps) - first])) + first
    low, high = pool[: cut + 1], pool[cut + 1 :]
    mode_sd = max(float(np.std(mode, ddof=1)) for mode in (low, high))
    if gaps[cut] <= MIN_GAP_IN_SDS * mode_sd or gaps[cut] <= 0:
        return None
    edge = (pool[cut] + pool[cut + 1]) / 2.0
    above_gap = {arm: int(np.count_nonzero(v > edge)) for arm, v in centred.items()}
    total = {arm: len(v) for arm, v in centred.items()}
    base, others = (above_gap[baseline], total[baseline]), [a for a in centred if a != baseline]
    fisher = {arm: fisher_p(*base, above_gap[arm], total[arm]) for arm in others}
    gap_pct = 100.0 * float(np.expm1(np.mean(high) - np.mean(low)))
    return Bimodality(above_gap=above_gap, total=total, gap_pct=gap_pct, fisher_p=fisher)


def fisher_p(
    hits: int,
    total: int,
    other_hits: int,
    other_total: int,
    alternative: Literal["two-sided", "less", "greater"] = "two-sided",
) -> float:
    """Return Fisher's exact p of ``hits``/``total`` against ``other_hits``/``other_total``."""
    from scipy.stats import fisher_exact  # slow to import, and rarely needed

    table = np.array([[hits, total - hits], [other_hits, other_total - other_hits]])
    return float(fisher_exact(table, alternative=alternative).pvalue)
