"""Stratified permutation test of a permuted-block design.

A block holds ``r`` runs of the baseline and ``r`` runs of the arm in random order. Under the
null hypothesis the labels of these ``2 r`` runs are exchangeable: each of the ``C(2 r, r)``
relabellings of a block is equally likely, independently of the other blocks. The test
statistic is the mean difference of the log values, arm minus baseline. The test is exact when
all relabellings are enumerated. With ``r = 1`` it is the sign-flip test of paired designs.

References: R. A. Fisher, *The Design of Experiments* (1935), section 21; E. S. Edgington and
P. Onghena, *Randomization Tests* (2007), chapter 4.

Examples
--------
Two blocks of one run per arm have ``2 ** 2 = 4`` relabellings. Row 0 is the observed one, and
swapping all labels of a row gives one of the other two:

>>> import numpy as np
>>> baseline = np.array([[10.0], [20.0]])  # [blocks, runs]
>>> arm = np.array([[12.0], [21.0]])
>>> labels = relabellings(blocks=2, runs=1)
>>> labels.signs  # columns: baseline and arm of block 0, baseline and arm of block 1
array([[-1,  1, -1,  1],
       [-1,  1,  1, -1]], dtype=int8)

The observed mean difference is ``((12 - 10) + (21 - 20)) / 2 = 1.5``. Two of the four
relabellings are as far from 0, so p is 2 / 4, the smallest p that two blocks can give:

>>> labels.mean_differences(pool_by_block(baseline, arm))
array([ 1.5,  0.5, -0.5, -1.5])
>>> permutation_test(baseline, arm)
0.5
>>> labels.smallest_p
0.5
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

MAX_ENUMERATED = 300_000  # relabellings; designs with more are sampled
N_RESAMPLES = 100_000
RESAMPLING_SEED = 20_260_612
CHUNK = 4096  # relabellings that are multiplied at a time
SAMPLED_OF = 17  # odd, because enumerated relabellings alternate
MAX_LISTED_RUNS = 5  # a block of more runs per arm has too many relabellings to draw from a list


@dataclass(frozen=True)
class Relabellings:
    """The relabellings that a blocked design is tested against; row 0 is the observed one.

    ``signs`` is int8 [relabellings / 2, 2 * runs * blocks]: +1 labels a run as the arm's, -1 as the
    baseline's. Columns go block by block, the baseline's runs before the arm's; ``runs`` is ``r``.

    The mirror image of each row, with all labels swapped, belongs to the set, too, and is not
    stored. So every null distribution is symmetric about 0, and the two-sided p is twice the
    smaller tail. If ``exact``, these are all relabellings, otherwise a sample.
    """

    signs: NDArray[np.int8]
    blocks: int
    runs: int
    exact: bool

    @property
    def count(self) -> int:
        """Number of relabellings, mirror images included."""
        return 2 * len(self.signs)

    @property
    def smallest_p(self) -> float:
        """Smallest two-sided p that this design can give: ``2 / count``."""
        return 2.0 / self.count

    def half_differences(self, values: Floats) -> Floats:
        """Return the mean difference, arm minus baseline, under each row of ``signs``.

        Its mirror image has the negative of it. Arguments and results are otherwise those of
        :meth:`mean_differences`.
        """
        scale = 1.0 / (self.blocks * self.runs)
        out = np.empty((len(self.signs), *values.shape[1:]))
        out[:CHUNK] = (self._first_signs @ values) * scale
        for start in range(CHUNK, len(self.signs), CHUNK):
            part = slice(start, start + CHUNK)
            out[part] = (self.signs[part].astype(np.float64) @ values) * scale
        return out

    def mean_differences(self, values: Floats) -> Floats:
        """Return the mean difference, arm minus baseline, under every relabelling.

        ``values``: float64 [2 * runs * blocks] or [2 * runs * blocks, rows], in the order of
        :func:`pool_by_block`. The result is float64 [relabellings] or [relabellings, rows].
        """
        half = self.half_differences(values)
        return np.concatenate([half, -half[::-1] if self.exact else -half])

    def rows_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of ``signs``, or of its mirror image, at places in all relabellings."""
        rows = np.minimum(places, self.count - 1 - places) if self.exact else places
        return np.asarray(rows % len(self.signs))

    @cached_property
    def _first_signs(self) -> Floats:
        """All signs of a small design, because converting them takes longer than their use."""
        return self.signs[:CHUNK].astype(np.float64)

    def restrict_to_blocks(self, positions: Sequence[int]) -> Relabellings:
        """Return the same relabellings, in the same order, restricted to some blocks.

        The result tests a row that lacks a block. Blocks are relabelled independently, so the
        test stays exact and still shares every relabelling with the complete rows.
        """
        if len(positions) == self.blocks:
            return self
        by_block = self.signs.reshape(len(self.signs), self.blocks, 2 * self.runs)
        signs = by_block[:, list(positions)].reshape(len(self.signs), -1)
        return Relabellings(signs, len(positions), self.runs, self.exact)

    @cached_property
    def half_correlation(self) -> Floats:
        """Correlation of each row of ``signs`` with the observed labels, -1 to 1; row 0 is 1."""
        return self.half_differences(np.tile(np.repeat([0.0, 1.0], self.runs), self.blocks))

    @property
    def label_correlation(self) -> Floats:
        """Correlation of each relabelling, in the order of :meth:`mean_differences`."""
        half = self.half_correlation
        return np.concatenate([half, -half[::-1] if self.exact else -half])


def smallest_p(blocks: int, runs: int) -> float:
    """Return the smallest two-sided p that ``blocks`` blocks of ``runs`` runs per arm can give."""
    return 2.0 / relabellings_counted(blocks, runs)


def relabellings_counted(blocks: int, runs: int) -> int:
    """Return the number of relabellings that a test counts: all, or the size of the sample."""
    possible = _possible_relabellings(blocks, runs)
    return possible if possible <= MAX_ENUMERATED else N_RESAMPLES


def _block_relabellings(runs: int) -> NDArray[np.int8]:
    """Return a block's relabellings, int8 [relabellings, 2 * runs]; the observed one is first."""
    # Combinations start with the last columns, which are the arm's own runs. The last one is the
    # mirror image of the first, and so on, which makes the first half of all blocks' a half.
    chosen = np.array(list(combinations(reversed(range(2 * runs)), runs)), np.intp)
    signs = np.full((len(chosen), 2 * runs), -1, np.int8)
    np.put_along_axis(signs, chosen, 1, axis=1)
    return signs


def _possible_relabellings(blocks: int, runs: int) -> int:
    return int(math.comb(2 * runs, runs) ** blocks)


@lru_cache(maxsize=8)
def relabellings(blocks: int, runs: int) -> Relabellings:
    """Enumerate up to 300,000 relabellings, or sample 100,000.

    The seed is fixed, so that the same values always have the same p. The sample includes the
    observed labels (the "+1" of B. Phipson and G. K. Smyth, 2010, without which p could be 0) and
    the mirror image of each relabelling. Raises ``ValueError`` if ``blocks`` or ``runs`` is below
    1.
    """
    if blocks < 1 or runs < 1:
        raise ValueError(f"blocks={blocks}, runs={runs}: both must be 1 or more")
    count = _possible_relabellings(blocks, runs)
    exact = count <= MAX_ENUMERATED
    if exact:
        indices = np.stack(
            np.unravel_index(np.arange(count // 2), (math.comb(2 * runs, runs),) * blocks), axis=1
        )
        signs = _block_relabellings(runs)[indices]
    else:
        signs = _sampled_signs(blocks, runs)
    signs = signs.reshape(len(signs), blocks * 2 * runs)
    signs.flags.writeable = False  # the cache gives every caller the same array
    return Relabellings(signs=signs, blocks=blocks, runs=runs, exact=exact)


def _sampled_signs(blocks: int, runs: int) -> NDArray[np.int8]:
    """Return a sample, int8 [relabellings, blocks, 2 * runs]; the observed one is first."""
    rng = np.random.default_rng([RESAMPLING_SEED, blocks, runs])
    if runs > MAX_LISTED_RUNS:  # imported runs; a block of labkit's own has at most 2 per arm
        observed = np.repeat(np.array([-1, 1], np.int8), runs)
        signs = rng.permuted(np.tile(observed, (N_RESAMPLES // 2, blocks, 1)), axis=2)
        signs[0] = observed
        return signs
    of_block = _block_relabellings(runs)
    indices = rng.integers(len(of_block), size=(N_RESAMPLES // 2, blocks), dtype=np.uint8)
    indices[0] = 0
    return of_block[indices]


def pool_by_block(baseline: Floats, arm: Floats) -> Floats:
    """Join two arms' values, each [blocks, runs, ...], into one array [2 * runs * blocks, ...].

    Block follows block; within a block the baseline's runs come before the arm's.
    """
    if baseline.shape != arm.shape or baseline.ndim < 2:
        raise ValueError(
            f"baseline has shape {baseline.shape} and arm {arm.shape}: they must be equal, "
            "[blocks, runs, ...]"
        )
    both = np.concatenate([baseline, arm], axis=1).astype(np.float64)
    return both.reshape(-1, *both.shape[2:])


def smallest(values: Floats, index: int) -> float:
    """Return the value at ``index`` of the sorted values, float64 [n].

    Of many values, only those are sorted that a sample shows to be among the smallest.
    """
    if len(values) > 100 * SAMPLED_OF and 4 * index < len(values):
        sample = values[::SAMPLED_OF]
        place = min(index // SAMPLED_OF * 5 // 4 + 16, len(sample) - 1)
        few = values[values <= np.partition(sample, place)[place]]
        values = few if index < len(few) else values
    return float(np.partition(values, index)[index])


def upper_tail_p(null_distribution: Floats) -> float:
    """Return the share of relabellings whose statistic is at least the observed one (element 0).

    Ties count, with a tolerance for the rounding of sums. It is relative to the largest statistic,
    because one near 0 is a sum of larger values and has their rounding.
    """
    tolerance = 1e-12 * float(np.max(np.abs(null_distribution), initial=0.0))
    return float(np.mean(null_distribution >= null_distribution[0] - tolerance))


def two_sided_p(null_distribution: Floats) -> float:
    """Return the two-sided p for a null distribution that is symmetric about 0."""
    return upper_tail_p(np.abs(null_distribution))


def permutation_test(baseline: Floats, arm: Floats) -> float:
    """Return the two-sided p-value of the hypothesis that the arm equals the baseline.

    ``baseline``, ``arm``: one value per run, float64 [blocks, runs], on the log scale where effects
    are ratios. The result is at least :func:`smallest_p` of the design and at most 1. For a row
    alone, it is the p of ``multiple_comparisons.InvertedTest``, from which reports take theirs.
    Raises ``ValueError`` if the shapes differ, are not [blocks, runs], or are empty.

    Examples
    --------
    In each of six blocks the arm took longer than the baseline. Of the ``2 ** 6 = 64``
    relabellings, the observed one and its mirror image are the farthest from 0, so p is 2 / 64:

    >>> import numpy as np
    >>> baseline = np.log([[10.0], [11.0], [12.0], [10.0], [13.0], [11.0]])
    >>> arm = np.log([[10.4], [11.3], [12.6], [10.2], [13.4], [11.5]])
    >>> permutation_test(baseline, arm)
    0.03125
    """
    values = pool_by_block(np.asarray(baseline, np.float64), np.asarray(arm, np.float64))
    return two_sided_p(relabellings(*np.shape(baseline)).mean_differences(values))
