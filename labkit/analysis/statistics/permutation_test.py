"""The stratified permutation test that matches permuted blocks; exact where enumerated.

A block holds ``r`` runs of the baseline and ``r`` of the arm in random order. Under the
null hypothesis the labels of these ``2 r`` runs are exchangeable, so each of the
``C(2 r, r)`` relabellings of a block is equally likely, independently per block. The
statistic is the mean difference of the log values, arm minus baseline. Reference:
R. A. Fisher, *The Design of Experiments* (1935), section 21; E. S. Edgington and
P. Onghena, *Randomization Tests* (2007), chapter 4. With ``r = 1`` this is the sign-flip
test of paired designs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_ENUMERATED = 300_000
N_RESAMPLES = 100_000
RESAMPLING_SEED = 20_260_612


@dataclass(frozen=True)
class Relabellings:
    """The reference set of a blocked design; row 0 is the labelling that was run.

    ``signs``: int8 [rows, 2 r blocks], +1 where a run is called arm and -1 where it is
    called baseline. Units lie block by block, the baseline's runs first. ``exact``: all
    relabellings; else ``signs`` is a sample, and with each row its mirror image belongs
    to the set. So the set is closed under swapping all labels, every statistic is
    symmetric about 0 and the two-sided p is twice the smaller tail.
    """

    signs: NDArray[np.int8]
    blocks: int
    runs: int
    exact: bool

    @property
    def count(self) -> int:
        """How many relabellings there are."""
        return len(self.signs) * (1 if self.exact else 2)

    @property
    def min_p(self) -> float:
        """The smallest two-sided p that this design can reach: ``2 / count``."""
        return 2.0 / self.count

    def mean_differences(self, values: Floats) -> Floats:
        """Return the mean difference under every relabelling.

        Parameters
        ----------
        values : float64 [2 r blocks] or [2 r blocks, rows]
            As :func:`pool_by_block` gives them.

        Returns
        -------
        float64 [relabellings] or [relabellings, rows]
        """
        scale = 1.0 / (self.blocks * self.runs)
        out = np.empty((len(self.signs), *values.shape[1:]))
        for start in range(0, len(self.signs), 4096):
            part = slice(start, start + 4096)
            out[part] = (self.signs[part].astype(np.float64) @ values) * scale
        return out if self.exact else np.concatenate([out, -out])

    def restrict_to_blocks(self, positions: Sequence[int]) -> Relabellings:
        """Return the same relabellings restricted to some blocks, in the same order.

        Blocks are relabelled independently, so the rows of a family that lack a block keep
        their own exact test and still share every relabelling with the others.
        """
        if len(positions) == self.blocks:
            return self
        units = self.signs.reshape(len(self.signs), self.blocks, 2 * self.runs)
        signs = units[:, list(positions)].reshape(len(self.signs), -1)
        return Relabellings(signs, len(positions), self.runs, self.exact)

    @cached_property
    def label_correlation(self) -> Floats:
        """How much each relabelling agrees with what was run, -1 to 1 (row 0: 1)."""
        return self.mean_differences(np.tile(np.repeat([0.0, 1.0], self.runs), self.blocks))


def min_p(blocks: int, runs: int) -> float:
    """Return the smallest two-sided p of ``blocks`` blocks of ``runs`` runs of each arm."""
    return 2.0 / _count(blocks, runs) if _enumerable(blocks, runs) else 2.0 / N_RESAMPLES


def _choices(runs: int) -> NDArray[np.int8]:
    """All relabellings of one block, int8 [C(2r, r), 2r]; the one that was run is first."""
    rows = []
    for chosen in combinations(reversed(range(2 * runs)), runs):
        row = np.full(2 * runs, -1, np.int8)
        row[list(chosen)] = 1
        rows.append(row)
    return np.stack(rows)


def _count(blocks: int, runs: int) -> int:
    return int(math.comb(2 * runs, runs) ** blocks)


def _enumerable(blocks: int, runs: int) -> bool:
    return _count(blocks, runs) <= MAX_ENUMERATED


@lru_cache(maxsize=8)
def relabellings(blocks: int, runs: int) -> Relabellings:
    """Build the reference set: all of it up to 300,000, else a fixed-seed sample of 100,000.

    The sample holds the labelling that was run (the "+1" of B. Phipson and G. K. Smyth,
    2010, without which p could be 0) and, with each relabelling, its mirror image.

    Raises
    ------
    ValueError
        ``blocks`` or ``runs`` is below 1.
    """
    if blocks < 1 or runs < 1:
        raise ValueError(f"blocks={blocks}, runs={runs}: must be 1 or more")
    choices = _choices(runs)
    exact = _enumerable(blocks, runs)
    if exact:
        shape = (len(choices),) * blocks
        picks = np.stack(np.unravel_index(np.arange(len(choices) ** blocks), shape), axis=1)
    else:
        rng = np.random.default_rng([RESAMPLING_SEED, blocks, runs])
        picks = rng.integers(len(choices), size=(N_RESAMPLES // 2, blocks), dtype=np.uint8)
        picks[0] = 0
    signs = choices[picks].reshape(len(picks), blocks * 2 * runs)
    signs.flags.writeable = False
    return Relabellings(signs=signs, blocks=blocks, runs=runs, exact=exact)


def pool_by_block(baseline: Floats, arm: Floats) -> Floats:
    """Lay out two arms' values, each [blocks, runs, ...], as units [2 runs blocks, ...]."""
    if baseline.shape != arm.shape or baseline.ndim < 2:
        raise ValueError(f"shapes {baseline.shape} and {arm.shape}: both must be [blocks, runs]")
    both = np.concatenate([baseline, arm], axis=1).astype(np.float64)
    return both.reshape(-1, *both.shape[2:])


def upper_tail_p(statistics: Floats) -> float:
    """Return the share of relabellings whose statistic reaches that of row 0, from above.

    Ties are counted, with a tolerance for the rounding of sums.
    """
    tolerance = 1e-12 * float(np.max(np.abs(statistics), initial=0.0))
    return float(np.mean(statistics >= statistics[0] - tolerance))


def two_sided_p(statistics: Floats) -> float:
    """Return the two-sided p of a statistic that is symmetric about 0 (row 0 is observed)."""
    return upper_tail_p(np.abs(statistics))


def permutation_test(baseline: Floats, arm: Floats) -> float:
    """Two-sided p of the stratified permutation test.

    Parameters
    ----------
    baseline, arm : float64 [blocks, runs]
        One value per run (log scale, if effects are ratios).
    """
    units = pool_by_block(np.asarray(baseline, np.float64), np.asarray(arm, np.float64))
    labels = relabellings(*np.shape(baseline))
    return two_sided_p(labels.mean_differences(units))
