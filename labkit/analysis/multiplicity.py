"""Many rows, one family: adjusted p-values.

Rows of one arm come from the same runs, so they share a relabelling: the step-down max-T
of P. H. Westfall and S. S. Young (1993, algorithm 4.1) needs no assumption about how they
depend on each other. Families without a shared relabelling use S. Holm (1979).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.analysis.permutation import SEED, Floats

JOINT_DRAWS = 100_000


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in the order given."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def standardised(statistics: Floats, units: Floats, blocks: int) -> Floats:
    """Divide mean differences by their standard deviation over all relabellings.

    Within a block the sum of ``r`` labels drawn without replacement has a known variance,
    which does not depend on the labels: the divisor is a constant of the test.

    Parameters
    ----------
    statistics : float64 [relabellings, rows]
    units : float64 [2 r blocks, rows]
    """
    per_block = units.reshape(blocks, -1, units.shape[1])
    size = per_block.shape[1]
    squares = ((per_block - per_block.mean(axis=1, keepdims=True)) ** 2).sum(axis=(0, 1))
    sd = np.sqrt(squares * size / (size - 1)) / (blocks * size / 2)
    tiny = 1e-14 * np.abs(units).max(axis=0, initial=1.0)
    scaled: Floats = np.where(sd > tiny, statistics / np.where(sd > tiny, sd, 1.0), 0.0)
    return scaled


def max_t(statistics: Floats) -> list[float]:
    """Adjust by step-down max-T; row 0 of ``statistics`` [relabellings, rows] is observed.

    The columns must be on one scale: see :func:`standardised`.
    """
    size = np.abs(statistics)
    order = np.argsort(-size[0], kind="stable")
    # For the i-th largest, the maximum over itself and all smaller ones.
    rest = np.maximum.accumulate(size[:, order[::-1]], axis=1)[:, ::-1]
    tolerance = 1e-12 * float(size.max(initial=0.0))
    raw = np.mean(rest >= size[0, order] - tolerance, axis=0)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(raw)
    return [float(x) for x in adjusted]


def joint_max_t(cells: Sequence[Floats]) -> list[list[float]]:
    """Adjust over many cells whose runs were randomised independently of each other.

    Each cell gives its standardised statistics [relabellings, rows]. A joint relabelling
    takes one of each cell; the observed ones together are the first of 100,000 draws.
    """
    rng = np.random.default_rng([SEED, len(cells)])
    drawn = []
    for cell in cells:
        picks = rng.integers(cell.shape[0], size=JOINT_DRAWS)
        picks[0] = 0
        drawn.append(cell[picks])
    adjusted = iter(max_t(np.concatenate(drawn, axis=1)))
    return [[next(adjusted) for _ in range(cell.shape[1])] for cell in cells]
