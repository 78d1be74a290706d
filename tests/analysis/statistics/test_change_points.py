"""Change points: known answers, the error rate of quiet series, and what is seen."""

from itertools import permutations

import numpy as np
import pytest

from labkit.analysis.statistics import change_points as module
from labkit.analysis.statistics.change_points import change_points

rng = np.random.default_rng(7)


def by_hand(values):
    """Return the p of the largest split from the definition, value by value."""

    def squares(part):
        return sum((x - np.mean(part)) ** 2 for x in part)

    def statistic(order):
        splits = range(2, len(order) - 1)
        return max(squares(order) - squares(order[:k]) - squares(order[k:]) for k in splits)

    orders = [statistic(order) for order in permutations(values)]
    return np.mean(np.array(orders) >= statistic(values) - 1e-9)


@pytest.mark.parametrize("values", [[1, 2, 5, 6, 7], [3, 3, 1, 9, 8], [4, 1, 3, 2, 5]])
def test_p_is_the_share_of_all_orders(values):
    (change,) = change_points(np.array(values, float), 1.0)  # too few for another split
    assert change.p == pytest.approx(by_hand(values))


def test_a_step_is_found_where_it_is():
    values = np.r_[rng.normal(0, 0.01, 9), rng.normal(0.1, 0.01, 7)]
    (change,) = change_points(values, 0.05)
    assert change.index == 9 and change.p < 0.01
    assert change_points(values, 0.05) == [change]
    assert [c.index for c in change_points(-values, 0.05)] == [9]


def test_two_steps_are_found_and_quiet_segments_rarely_split(monkeypatch):
    monkeypatch.setattr(module, "DRAWS", 399)
    noise, extra = np.random.default_rng(3), 0
    for _ in range(40):
        steps = np.repeat([0.0, 0.1, 0.3], 12) + noise.normal(0, 0.01, 36)
        found = {change.index for change in change_points(steps, 0.05)}
        assert found >= {12, 24}
        extra += found > {12, 24}
    assert extra <= 6  # 2 expected


def test_a_split_that_another_change_misplaced_is_moved(monkeypatch):
    """The first split sees one level and two others mixed; between its neighbours it is at 12."""
    monkeypatch.setattr(module, "DRAWS", 399)
    noise = np.random.default_rng(37).normal(0, 0.01, 36)
    values = np.repeat([0.0, 0.03, 0.01], 12) + noise
    assert [change.index for change in change_points(values, 0.05)] == [12, 24]


def test_an_outlier_and_a_constant_series_are_no_change():
    quiet = rng.normal(0, 0.01, 12)
    quiet[5] = 9.0
    assert change_points(quiet, 0.05) == [] and change_points(np.ones(12), 0.05) == []
    assert change_points(np.array([]), 0.05) == []


@pytest.mark.parametrize("n", [8, 14])
def test_quiet_series_rarely_get_a_change(n, monkeypatch):
    """Skewed noise and ties, too: all orders are as likely."""
    monkeypatch.setattr(module, "DRAWS", 399)
    noise = np.random.default_rng(11)
    samples = [np.round(noise.lognormal(0, 1, n), 1) for _ in range(60 if n == 8 else 400)]
    found = sum(bool(change_points(values, 0.05)) for values in samples)
    assert found / len(samples) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / len(samples))


def test_fewer_values_cannot_reach_the_level():
    steps = [np.r_[np.zeros(n // 2), np.ones(n - n // 2)] + np.arange(n) / 99 for n in (7, 8)]
    assert [len(change_points(values, 0.05)) for values in steps] == [0, 1]


@pytest.mark.parametrize("lines", [1, 499, 501, 1_500])
def test_a_clear_step_is_found_however_many_series_share_alpha(lines):
    """Each has alpha / lines, which 9,999 orders alone could not reach from 500 lines on."""
    steps = np.repeat([0.0, 1.0], 15) + np.random.default_rng(1).normal(0, 0.001, 30)
    (change,) = change_points(steps, 0.05 / lines)
    assert change.index == 15 and change.p <= 0.05 / lines


def test_a_quiet_series_draws_no_more_orders_than_it_takes_to_see_so(monkeypatch):
    noise, drawn = np.random.default_rng(2).normal(0, 1, 30), []
    statistics = module._statistics
    monkeypatch.setattr(module, "_statistics", lambda x: drawn.append(len(x)) or statistics(x))
    assert change_points(noise, 0.05 / 50_000) == [] and sum(drawn) <= 1 + module.DRAWS
