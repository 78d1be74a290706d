"""Greedy sampling of a replayed step equals NumPy's argmax."""

import numba
import numpy as np
import pytest

from labkit.cpu.layers.top_two_logits import CANDIDATE, find_candidate, merge_candidates, num_parts
from labkit.engine.sampling.sampler import greedy

# Python cannot call functions of kernels.
parts_of = numba.njit(lambda width: num_parts(width))
find = numba.njit(lambda *arguments: find_candidate(*arguments))
merge = numba.njit(lambda *arguments: merge_candidates(*arguments))


def best_of(logits):
    """Return the best token of each row and its lead, as the last node of a graph finds them."""
    rows, width = logits.shape
    parts = parts_of(width)
    candidates = np.zeros(rows * parts, CANDIDATE)
    tokens, leads = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    for unit in range(rows * parts):
        find(logits.ctypes.data, width, unit, candidates.ctypes.data)
    merge(candidates.ctypes.data, width, tokens, leads)
    return tokens, leads


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 4096, 9001, 49152])
def test_the_greedy_choice_is_numpys(width):
    rng = np.random.default_rng(width)
    logits = rng.standard_normal((12, width)).astype(np.float32)
    logits[1] = 0  # all are equal: the lowest id
    logits[2] = np.sort(logits[2])
    logits[3] = np.sort(logits[3])[::-1]
    logits[4, rng.integers(width)] = logits[4].max()  # two are equal, perhaps in two parts
    logits[5] = -np.inf
    logits[6, width // 2] = np.inf
    logits[7, width - 1] = np.nan
    logits[8, 0] = np.nan
    logits[9, : width // 2] = -np.inf
    with np.errstate(invalid="ignore"):
        expected, expected_leads = greedy(logits.copy())
    tokens, leads = best_of(logits)
    numbers = ~np.isnan(expected_leads)
    assert np.array_equal(np.isnan(leads), ~numbers)
    assert np.array_equal(tokens[numbers], expected[numbers])
    assert np.array_equal(leads[numbers], expected_leads[numbers])
