"""Two independent samples: the permutation test for runs that were not interleaved.

Used between studies. All relabellings of ``old + new`` runs are equally likely only if
nothing but the code changed between the studies; the probe has to speak for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.permutation import (
    ENUMERATE_UP_TO,
    MONTE_CARLO,
    SEED,
    Floats,
    tail,
)


@dataclass(frozen=True)
class Splits:
    """Ways to call ``new`` of ``old + new`` runs new; column 0 is what was run (new last).

    ``called_new``: uint8 [old + new, splits], 1 where a run is called new.
    """

    called_new: NDArray[np.uint8]
    old: int
    new: int

    @property
    def count(self) -> int:
        """How many splits there are."""
        return int(self.called_new.shape[1])

    @cached_property
    def overlap(self) -> Floats:
        """How much each split agrees with what was run, at most 1 (row 0: 1)."""
        return self.mean_differences(np.repeat([0.0, 1.0], [self.old, self.new]))

    @property
    def floor(self) -> float:
        """The smallest two-sided p that these numbers of runs can reach."""
        return min(1.0, 2.0 / self.count)

    def mean_differences(self, values: Floats) -> Floats:
        """Give the mean difference, new minus old, under every split.

        Parameters
        ----------
        values : float64 [old + new] or [old + new, rows]
            The old runs first.

        Returns
        -------
        float64 [splits] or [splits, rows]
        """
        # Centred values add up to 0, so the old ones' mean follows from the new ones' sum.
        centred = np.asarray(values, np.float64) - np.mean(values, axis=0)
        out = np.empty((*centred.shape[1:], self.count))
        for start in range(0, self.count, 4096):
            part = slice(start, start + 4096)
            out[..., part] = centred.T @ self.called_new[:, part].astype(np.float64)
        scaled: Floats = out.T * (1.0 / self.new + 1.0 / self.old)
        return scaled


@lru_cache(maxsize=8)
def splits(old: int, new: int) -> Splits:
    """Enumerate the splits up to 300,000, else draw 100,000 (what was run among them)."""
    size = old + new
    if math.comb(size, new) <= ENUMERATE_UP_TO:
        # Reversed, so that the last runs being new, which is what was run, come first.
        chosen = np.array(list(combinations(reversed(range(size)), new)), np.int64)
        called_new = np.zeros((size, len(chosen)), np.uint8)
        np.put_along_axis(called_new, chosen.T, 1, axis=0)
    else:
        called_new = _draw(old, new)
    called_new.flags.writeable = False
    return Splits(called_new=called_new, old=old, new=new)


def _draw(old: int, new: int) -> NDArray[np.uint8]:
    """Draw 100,000 splits, all equally likely; the first is what was run.

    Selection sampling (D. E. Knuth, *The Art of Computer Programming* 2, 3.4.2, algorithm
    S): of ``left`` runs, ``missing`` of which are still to be called new, the next one is
    with probability ``missing / left``. In whole numbers, so exactly.
    """
    size = old + new
    rng = np.random.default_rng([SEED, old, new])
    kind = np.min_scalar_type(size)
    missing = np.full(MONTE_CARLO, new, kind)
    called_new = np.empty((size, MONTE_CARLO), np.uint8)
    for run in range(size):
        np.less(
            rng.integers(size - run, size=MONTE_CARLO, dtype=kind), missing, out=called_new[run]
        )
        missing -= called_new[run]
    called_new[:, 0] = np.repeat([0, 1], [old, new])
    return called_new


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
