"""The equivalence test against shifted one-sided tests, and its bound."""

import numpy as np
import pytest

from labkit.analysis.statistics.equivalence_test import equivalence_test
from labkit.analysis.statistics.hodges_lehmann import breakpoints, to_log_ratio
from labkit.analysis.statistics.permutation_test import pool_by_block, relabellings

rng = np.random.default_rng


def test_equivalence_is_twice_the_larger_of_two_shifted_one_sided_tests():
    baseline, arm = rng(1).normal(0, 0.004, (4, 2)), rng(2).normal(0.003, 0.004, (4, 2))
    labels = relabellings(4, 2)
    equivalence = equivalence_test(
        breakpoints(
            labels.mean_differences(pool_by_block(baseline, arm)), labels.label_correlation
        ),
        2.0,
        0.05,
    )

    def share(shift, sign):
        t = sign * labels.mean_differences(pool_by_block(baseline, arm - shift))
        return np.mean(t >= t[0] - 1e-13)

    expected = 2 * max(share(to_log_ratio(-2.0), 1), share(to_log_ratio(2.0), -1))
    assert equivalence.p == pytest.approx(expected) and equivalence.p < 0.05
    assert 0 < equivalence.bound_pct < 2.0
    far = equivalence_test(
        breakpoints(
            labels.mean_differences(pool_by_block(baseline, arm + 0.05)), labels.label_correlation
        ),
        2.0,
        0.05,
    )
    assert far.p > 0.9


def test_bound_is_the_smallest_margin_that_would_hold():
    baseline, arm = rng(3).normal(0, 0.01, (5, 1)), rng(4).normal(0.0, 0.01, (5, 1))
    labels = relabellings(5, 1)
    points = breakpoints(
        labels.mean_differences(pool_by_block(baseline, arm)), labels.label_correlation
    )
    # In percent a decrease counts as it is shown: the bound is symmetric in percent.
    bound = equivalence_test(points, 2.0, 0.1).bound_pct
    assert (
        equivalence_test(points, bound * 1.001, 0.1).p
        <= 0.1
        < equivalence_test(points, bound * 0.999, 0.1).p
    )
