"""Two independent samples: the permutation test for runs that were not interleaved.

Used between studies. All relabellings of ``old + new`` runs are equally likely only if
nothing but the code changed between the studies; the probe has to speak for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from labkit.analysis.permutation import (
    ENUMERATE_UP_TO,
    MONTE_CARLO,
    SEED,
    Floats,
    tail,
)


@dataclass(frozen=True)
class Splits:
    """Ways to call ``new`` of ``old + new`` runs new; row 0 is what was run (new last).

    ``weights``: float64 [splits, old + new], such that ``weights @ values`` is the mean
    difference, new minus old.
    """

    weights: Floats
    old: int
    new: int

    @property
    def count(self) -> int:
        """How many splits there are."""
        return len(self.weights)

    @property
    def overlap(self) -> Floats:
        """How much each split agrees with what was run, at most 1 (row 0: 1)."""
        return self.mean_differences(np.repeat([0.0, 1.0], [self.old, self.new]))

    @property
    def floor(self) -> float:
        """The smallest two-sided p that these numbers of runs can reach."""
        return min(1.0, 2.0 / self.count)

    def mean_differences(self, values: Floats) -> Floats:
        """Give the mean difference under every split; ``values``: the old runs first."""
        found: Floats = self.weights @ values
        return found


@lru_cache(maxsize=8)
def splits(old: int, new: int) -> Splits:
    """Enumerate the splits up to 300,000, else draw 100,000 (what was run among them)."""
    size = old + new
    if math.comb(size, new) <= ENUMERATE_UP_TO:
        # Reversed, so that the last runs being new, which is what was run, come first.
        every = list(combinations(reversed(range(size)), new))
        chosen = np.array(every, np.int64)
    else:
        rng = np.random.default_rng([SEED, old, new])
        chosen = rng.random((MONTE_CARLO, size)).argsort(axis=1)[:, :new]
        chosen[0] = np.arange(old, size)
    weights = np.full((len(chosen), size), -1.0 / old)
    np.put_along_axis(weights, chosen, 1.0 / new, axis=1)
    weights.flags.writeable = False
    return Splits(weights=weights, old=old, new=new)


def two_sided_p(statistics: Floats) -> float:
    """Give twice the smaller tail, at most 1: unequal samples are not symmetric about 0."""
    return min(1.0, 2.0 * min(tail(statistics), tail(-statistics)))


def hodges_lehmann_shift(old: Floats, new: Floats) -> float:
    """Estimate the shift: the median of all differences, new minus old."""
    return float(np.median(new[:, None] - old[None, :]))


def pooled_sd(old: Floats, new: Floats) -> float | None:
    """Estimate the standard deviation between runs; None where nothing is left to."""
    freedom = len(old) + len(new) - 2
    squares = float(((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum())
    return math.sqrt(squares / freedom) if freedom > 0 else None
