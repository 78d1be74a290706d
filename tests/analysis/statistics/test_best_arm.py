"""The best of several arms: coverage in simulated studies, and known answers."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from labkit.analysis.statistics import best_arm
from labkit.analysis.statistics.best_arm import BlockedValues, possibly_best, winner

FILE = Path(__file__).parents[3] / "benchmarks" / "best_arm_coverage.py"


@pytest.fixture
def coverage(monkeypatch):
    """The benchmark that simulates studies, with few permutations per set."""
    spec = importlib.util.spec_from_file_location("best_arm_coverage", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(best_arm, "N_PERMUTATIONS", 100)
    spec.loader.exec_module(module)
    return module


def noisy(means, blocks=10, runs=1, sd=0.01, seed=1):
    rng = np.random.default_rng(seed)
    return np.array(means) + rng.normal(0, sd, (blocks, runs, len(means)))


@pytest.mark.parametrize("truth", ["equal", "clear", "ladder"])
def test_intervals_and_sets_cover_in_simulated_studies(coverage, truth):
    """Over 300 studies: within three standard errors of 95 %."""
    rates = coverage.rates(truth, "clean", (10, 1), 12, 300)
    assert 0.91 <= rates.interval <= 0.99
    assert rates.set >= 0.91
    if truth == "equal":
        assert rates.usual < 0.89  # ignoring the choice covers too seldom


@pytest.fixture
def search(coverage, monkeypatch):
    """The benchmark that simulates searches."""
    file = FILE.with_name("search_error_rate.py")
    spec = importlib.util.spec_from_file_location("search_error_rate", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("truth", "runs"), [("equal", 1.0), ("clear", 0.5)])
def test_a_search_loses_the_best_in_at_most_5_of_100_studies(search, truth, runs):
    rates = search.search_rates("one run", truth, "clean", 6, 150)
    assert rates.wrong <= 0.05
    assert rates.runs <= runs
    assert (rates.one_left >= 0.9) == (truth == "clear")


@pytest.mark.parametrize("noise", ["slow processes", "heavy tails"])
def test_a_search_with_two_runs_per_block_loses_the_best_as_seldom(search, noise):
    assert search.search_rates("two runs", "two", noise, 6, 100).wrong <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arms", "truth"), list(itertools.product((2, 4, 12), ("equal", "clear", "two")))
)
@pytest.mark.parametrize("noise", ["clean", "drift", "slow processes", "unequal"])
def test_intervals_cover_in_93_to_97_of_100_studies(coverage, noise, arms, truth):
    rates = coverage.rates(truth, noise, (10, 1), arms, 3000)
    assert 0.925 <= rates.interval <= 0.975
    assert rates.set >= 0.94


def test_a_clear_winner_has_the_usual_interval():
    """If no other arm could have won, the choice changes nothing but a tenth of alpha."""
    values = noisy([0.0, 0.01, 0.5])
    won, arms = winner(values, 0, 0.05), BlockedValues(values)
    assert (won.arm, won.reference) == (2, 0)
    observed = arms.means[2] - arms.means[0]
    assert won.difference == pytest.approx(observed, abs=1e-6)
    reach = stats.t.isf(0.025, arms.degrees_of_freedom) * arms.standard_error(2, 0)
    assert won.interval[1] - observed == pytest.approx(reach, rel=0.02)
    assert observed - won.interval[0] == pytest.approx(reach, rel=0.02)


def test_a_close_race_pulls_the_winner_s_estimate_down():
    values = noisy([0.0, 0.0, 0.02, 0.02, 0.02], seed=3)
    won, means = winner(values, 0, 0.05), values.mean(axis=(0, 1))
    assert won.interval[0] < won.difference < means[won.arm] - means[0]


def test_a_winning_reference_is_compared_with_the_second_best():
    won = winner(noisy([0.3, 0.0, 0.2]), 0, 0.05)
    assert (won.arm, won.reference) == (0, 2)
    assert won.interval[0] < won.difference < won.interval[1]
    assert won.difference == pytest.approx(0.1, abs=0.02)


def test_the_set_leaves_out_what_is_clearly_worse():
    for values, left in (
        (noisy([0.0, 0.1, 0.1, 0.05], seed=5), {1, 2}),
        (noisy([0.0, 0.1, 0.2], blocks=4, runs=2), {2}),
        (noisy([0.0] * 4, seed=2), {0, 1, 2, 3}),
    ):
        means = values.mean(axis=(0, 1))  # the largest comes first
        assert possibly_best(values, 0.05) == tuple(sorted(left, key=lambda arm: -means[arm]))


def test_two_arms_are_separated_where_the_one_sided_t_test_separates_them():
    """With two arms the critical value is Student's, up to the permutations."""
    for seed, difference in itertools.product(range(30), (0.004, 0.008)):
        values = noisy([0.0, difference], seed=seed)
        p = stats.ttest_rel(values[:, 0, 1], values[:, 0, 0], alternative="greater").pvalue
        if not 0.035 <= min(p, 1 - p) <= 0.065:
            assert (len(possibly_best(values, 0.05)) == 1) == (min(p, 1 - p) < 0.05)


def test_a_shift_of_a_block_changes_nothing():
    values = noisy([0.0, 0.03, 0.04, 0.01], blocks=6, runs=2)
    moved = values + np.linspace(-3, 3, 6)[:, None, None]
    assert possibly_best(moved, 0.05) == possibly_best(values, 0.05)
    first, second = winner(values, 0, 0.05), winner(moved, 0, 0.05)
    assert second.interval == pytest.approx(first.interval, abs=1e-9)


def test_values_without_noise_leave_the_best_alone():
    values = np.tile([0.0, 0.1, 0.2], (4, 2, 1))
    assert possibly_best(values, 0.05) == (2,)
    won = winner(values, 0, 0.05)
    assert won.interval == (pytest.approx(0.2), pytest.approx(0.2))


@pytest.mark.parametrize("shape", [(4, 2), (4, 1, 1), (1, 1, 3), (2, 1, 3)])
def test_values_must_allow_an_estimate_of_the_noise(shape):
    values = np.zeros(shape)
    if shape == (2, 1, 3):
        assert BlockedValues(values).degrees_of_freedom == 1
    else:
        with pytest.raises(ValueError, match="they must be"):
            BlockedValues(values)


def test_the_interval_is_that_of_the_truncated_distribution():
    """At each limit, the chosen difference has the tail's probability, by numerical integration."""
    values = noisy([0.0, 0.0, 0.02, 0.019], seed=8)
    arms, won = BlockedValues(values), winner(values, 0, 0.05)
    means = arms.means
    others = np.delete(means, won.arm)
    low = max(0.0, means[won.arm] - means[0] - 2 * (means[won.arm] - others.max()))
    observed, df = means[won.arm] - means[0], arms.degrees_of_freedom
    error = arms.standard_error(won.arm, 0)
    reach = stats.t.isf(0.005 / 6, df)
    tail = (0.05 - 0.005) / 0.995 / 2
    for limit, wanted in zip(won.interval, (1 - tail, tail), strict=True):
        grid = np.linspace(max(low, limit - reach * error), limit + reach * error, 200_001)
        density = stats.t.pdf((grid - limit) / error, df)
        below = density[grid <= observed].sum() / density.sum()
        assert below == pytest.approx(wanted, abs=2e-4)
    assert math.isfinite(low)
