"""Fast and slow processes: are there two modes, and do they fall on one arm?

Modes are reported, never dropped: launching again "until fast" would bias the result.
Each arm's runs are taken relative to the arm's median, so that an effect is not taken for
a mode; the widest gap between neighbours splits them if it is far wider than the spread
on both sides. Whether the slow ones favour an arm is R. A. Fisher's exact test (scipy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from labkit.analysis.statistics.permutation_test import Floats

GAP_TO_SPREAD = 3.0
FEWEST = 3


@dataclass(frozen=True)
class Bimodality:
    """Runs above the gap per arm: ``upper`` of ``total``; ``gap_pct`` apart (percent).

    ``fisher_p``: arm -> p of the table of that arm against the baseline.
    """

    upper: Mapping[str, int]
    total: Mapping[str, int]
    gap_pct: float
    fisher_p: Mapping[str, float]


def find_modes(values: Mapping[str, Floats], baseline: str) -> Bimodality | None:
    """Look for two modes in the log values of each arm's runs; None where there is one."""
    centred = {arm: v - np.median(v) for arm, v in values.items() if len(v)}
    pool = np.sort(np.concatenate(list(centred.values()))) if centred else np.empty(0)
    if baseline not in centred or len(pool) < 2 * FEWEST + 2:
        return None
    gaps = np.diff(pool)
    cut = int(np.argmax(gaps[FEWEST - 1 : len(gaps) - FEWEST + 1])) + FEWEST - 1
    low, high = pool[: cut + 1], pool[cut + 1 :]
    spread = max(float(np.std(low, ddof=1)), float(np.std(high, ddof=1)))
    if gaps[cut] <= GAP_TO_SPREAD * spread or gaps[cut] <= 0:
        return None
    edge = (pool[cut] + pool[cut + 1]) / 2.0
    upper = {arm: int(np.count_nonzero(v > edge)) for arm, v in centred.items()}
    total = {arm: len(v) for arm, v in centred.items()}
    fisher = {
        arm: fisher_p(upper[baseline], total[baseline], upper[arm], total[arm])
        for arm in centred
        if arm != baseline
    }
    gap_pct = 100.0 * float(np.expm1(np.mean(high) - np.mean(low)))
    return Bimodality(upper=upper, total=total, gap_pct=gap_pct, fisher_p=fisher)


def fisher_p(
    hits: int,
    total: int,
    other_hits: int,
    other_total: int,
    alternative: Literal["two-sided", "less", "greater"] = "two-sided",
) -> float:
    """Fisher's exact p of ``hits`` of ``total`` against ``other_hits`` of ``other_total``."""
    from scipy.stats import fisher_exact  # loads slowly, and most studies have no modes

    table = np.array([[hits, total - hits], [other_hits, other_total - other_hits]])
    return float(fisher_exact(table, alternative=alternative).pvalue)
