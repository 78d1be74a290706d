"""Families that share no relabelling: adjusted p-values.

Rows of one arm in one cell do share one: see :mod:`labkit.analysis.statistics.simultaneous`. Many
cells were randomised independently of each other, so a joint relabelling takes one of each.
What has no relabelling in common at all uses S. Holm (1979).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.statistics.permutation import SEED, Floats
from labkit.analysis.statistics.simultaneous import RowTest, others_largest

JOINT_DRAWS = 100_000


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in the order given."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def joint_p(cells: Sequence[Sequence[RowTest]]) -> list[list[float]]:
    """Adjust the p of "no effect" over the rows of many cells by single-step max-T.

    The observed relabellings of all cells together are the first of 100,000 joint draws.
    Each p is that of :meth:`RowTest.region` at 0, with the rows of all cells as the others.
    """
    rng = np.random.default_rng([SEED, len(cells)])
    picks = []
    for tests in cells:
        drawn = rng.integers(len(tests[0].statistics), size=JOINT_DRAWS)
        drawn[0] = 0
        picks.append(drawn)
    tops = [
        np.max(np.stack([test.sizes for test in tests]), axis=0)[drawn]
        for tests, drawn in zip(cells, picks, strict=True)
    ]
    return [
        _cell_p(tests, drawn, [top for j, top in enumerate(tops) if j != i])
        for i, (tests, drawn) in enumerate(zip(cells, picks, strict=True))
    ]


def _cell_p(
    tests: Sequence[RowTest], drawn: NDArray[np.int64], elsewhere: Sequence[Floats]
) -> list[float]:
    """Give the p of one cell's rows; ``elsewhere``: the other cells' largest sizes, drawn."""
    found = []
    for test, others in zip(tests, others_largest(tests), strict=True):
        rest = [*elsewhere, *([] if others is None else [others[drawn]])]
        against = test.reached[drawn]
        for sizes in rest:
            against = against | (sizes >= test.observed * (1.0 - 1e-12))
        found.append(float(np.mean(against)))
    return found
