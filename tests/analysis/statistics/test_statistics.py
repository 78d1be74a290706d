"""Known answers of every statistic, from scipy, the literature or counting by hand."""

import doctest
import tracemalloc
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from shift_interval import confidence_interval

from labkit.analysis.statistics import permutation_test as permutation_module
from labkit.analysis.statistics.bimodality import find_modes, fisher_p
from labkit.analysis.statistics.equivalence_test import equivalence_test
from labkit.analysis.statistics.hodges_lehmann import (
    MAX_PAIRED,
    Breakpoints,
    breakpoints,
    hodges_lehmann,
    to_log_ratio,
    to_percent,
)
from labkit.analysis.statistics.interim_analysis import alpha_at, parse_looks, withheld_reason
from labkit.analysis.statistics.multiple_comparisons import holm
from labkit.analysis.statistics.permutation_test import (
    permutation_test,
    pool_by_block,
    relabellings,
    smallest,
    smallest_p,
)
from labkit.analysis.statistics.power import (
    alpha_share,
    attained_alpha,
    between_run_sd,
    blocks_needed,
    detectable_errors,
    mde_pct,
    min_blocks_to_claim,
    one_minute_mde_pct,
    single_row_mde_pct,
)
from labkit.analysis.statistics.probe_adjustment import noise_correlation, probe_adjusted

rng = np.random.default_rng


def test_nine_pairs_match_scipy():
    for seed in range(5):
        differences = rng(seed).normal(0.4, 1.0, 9)
        expected = stats.permutation_test(
            (differences,),
            lambda x, axis: x.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        ).pvalue
        arm = np.asarray(differences)[:, None]
        assert permutation_test(np.zeros_like(arm), arm) == pytest.approx(expected, abs=1e-12)


def test_one_block_matches_scipy_independent_samples():
    baseline, arm = rng(3).normal(0, 1, 4), rng(4).normal(1, 1, 4)
    expected = stats.permutation_test(
        (arm, baseline),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue
    assert permutation_test(baseline[None], arm[None]) == pytest.approx(expected, abs=1e-12)


def test_stratified_p_counts_every_relabelling_of_every_block():
    baseline, arm = rng(5).normal(0, 1, (3, 2)), rng(6).normal(0.8, 1, (3, 2))
    blocks = np.concatenate([baseline, arm], axis=1)

    def statistic(chosen):
        return sum(
            row[list(pick)].sum() - row[[i for i in range(4) if i not in pick]].sum()
            for row, pick in zip(blocks, chosen, strict=True)
        )

    every = [statistic(c) for c in product(combinations(range(4), 2), repeat=3)]
    observed = abs(statistic([(2, 3)] * 3))
    by_hand = sum(abs(s) >= observed - 1e-12 for s in every) / len(every)
    assert len(every) == 216
    assert permutation_test(baseline, arm) == pytest.approx(by_hand)


def test_floor_is_reached_by_separated_arms_and_matches_the_count():
    for blocks, runs, floor in ((3, 2, 2 / 216), (4, 2, 2 / 1296), (6, 1, 2 / 64), (2, 2, 2 / 36)):
        values = rng(blocks).normal(0, 0.01, (blocks, runs))
        assert smallest_p(blocks, runs) == pytest.approx(floor)
        assert relabellings(blocks, runs).smallest_p == pytest.approx(floor)
        assert permutation_test(values, values[::-1] + 1.0) == pytest.approx(floor)


def test_monte_carlo_past_300_000_adds_one_and_agrees_with_a_normal_bound():
    labels = relabellings(8, 2)
    assert not labels.exact and relabellings(7, 2).exact
    assert smallest_p(8, 2) == labels.smallest_p == pytest.approx(2e-5)
    values = rng(1).normal(0, 1.0, (8, 2))
    assert permutation_test(values, values + 9.0) == labels.smallest_p  # never 0
    arm = rng(2).normal(0.7, 1.0, (8, 2))
    units = pool_by_block(values, arm)
    statistics = labels.mean_differences(units)
    scale = abs(statistics[0]) / statistics.std()
    assert permutation_test(values, arm) == pytest.approx(2 * stats.norm.sf(scale), abs=0.01)


def test_one_long_block_is_sampled_and_agrees_with_scipy():
    labels = relabellings(1, 12)
    assert not labels.exact and labels.count == 100_000
    assert (labels.signs[0] == np.repeat([-1, 1], 12)).all() and not labels.signs.sum(axis=1).any()
    baseline, arm = rng(3).normal(0, 1, 12), rng(4).normal(0.7, 1, 12)
    expected = stats.permutation_test(
        (arm, baseline),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        vectorized=True,
        rng=1,
    ).pvalue
    assert permutation_test(baseline[None], arm[None]) == pytest.approx(expected, rel=0.15)
    assert permutation_test(baseline[None], arm[None] + 100) == pytest.approx(2 / 100_000)
    assert [min_blocks_to_claim(runs) for runs in (1, 2, 3, 6, 12)] == [6, 3, 2, 1, 1]


def test_ties_count_as_reached():
    same = np.ones((4, 2))
    assert permutation_test(same, same) == 1.0
    assert confidence_interval(same, same + 0.5) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("seed", range(8))
def test_ties_do_not_depend_on_rounding(seed):
    """Sums of whole numbers are exact; those of tenths are rounded, and must tie all the same."""
    baseline, arm = rng(seed).integers(0, 4, (2, 4, 2)).astype(float)
    labels = relabellings(4, 2)
    whole, tenths = (
        breakpoints(
            labels.mean_differences(pool_by_block(x * baseline, x * (arm + 1))),
            labels.label_correlation,
        )
        for x in (1.0, 0.1)
    )
    assert permutation_test(0.1 * baseline, 0.1 * (arm + 1)) == permutation_test(baseline, arm + 1)
    for shift in range(-2, 5):
        assert tenths.p_greater(0.1 * shift) == whole.p_greater(shift)
        assert tenths.p_less(0.1 * shift) == whole.p_less(shift)


def test_a_shift_at_which_every_relabelling_ties_is_not_rejected():
    same = np.full((4, 2), 0.5)  # whose sums are exact
    labels = relabellings(4, 2)
    points = breakpoints(
        labels.mean_differences(pool_by_block(same, same)), labels.label_correlation
    )
    assert points.p_greater(0.0) == points.p_less(0.0) == 1.0
    assert equivalence_test(points, 2.0, 0.05).p == pytest.approx(2 / 1296)


def test_a_sample_of_relabellings_holds_both_directions_of_each():
    """Otherwise the lower limit of an interval would not mirror the upper one."""
    labels = relabellings(8, 2)
    baseline, arm = rng(9).normal(0, 1, (2, 8, 2))
    statistics = labels.mean_differences(pool_by_block(baseline, arm))
    assert len(statistics) == labels.count == 100_000
    assert np.array_equal(np.sort(statistics), np.sort(-statistics))
    low, high = confidence_interval(baseline, arm)
    assert confidence_interval(arm, baseline) == pytest.approx((-high, -low), rel=0.05)
    assert low < hodges_lehmann(baseline, arm) < high


@pytest.mark.parametrize("shape", [(3, 2), (8, 2), (1, 3)])
def test_each_relabelling_is_a_stored_row_or_its_mirror_image(shape):
    labels, values = relabellings(*shape), rng(7).normal(size=2 * shape[0] * shape[1])
    everywhere, rows = labels.mean_differences(values), labels.rows_of(np.arange(labels.count))
    half = labels.half_differences(values)
    mirrored = np.where(np.arange(labels.count) < len(half), 1, -1)
    assert np.array_equal(everywhere, mirrored * half[rows])
    assert np.array_equal(np.bincount(rows), np.full(len(half), 2))
    if labels.exact:  # the mirror images are the relabellings that are not stored
        both = np.concatenate([labels.signs, -labels.signs])
        assert len(np.unique(both, axis=0)) == labels.count


def test_a_limit_is_the_same_as_after_sorting():
    values = np.round(rng(8).normal(size=5000), 2)  # with ties
    for index in (0, 1, 40, 400, 1249, 1251, 2500, 4999):
        assert smallest(values, index) == np.sort(values)[index]
    assert smallest(np.minimum(np.arange(5000.0) % 17, 1.0), 400) == 1.0  # the sample has zeros


def test_a_relabelling_drawn_twice_that_equals_the_observed_one_counts_at_every_shift():
    correlation = np.array([1.0, 1.0, 0.0, -1.0])
    points = breakpoints(np.array([3.0, 3.0, 1.0, -3.0]), correlation)
    assert (points.n_observed, list(points.shifts)) == (2, [2.0, 3.0])
    assert points.p_greater(-9.0) == points.p_less(9.0) == 0.5
    assert points.interval(0.99) is None and points.interval(1.0) == (2.0, 3.0)


def test_an_interval_s_rank_is_exact_whatever_the_rounding():
    """0.018 * 100,000 is just below 1,800 in floating point."""
    assert 0.018 * 100_000 < 1800
    points = Breakpoints(np.arange(99_999.0), 1)
    low, high = points.interval(0.018)
    assert (low, high) == (899.0, 99_998.0 - 899.0)
    assert 2 * points.p_greater(low) > 0.018 >= 2 * points.p_greater(low - 0.5)


def test_hodges_lehmann_of_pairs_is_the_median_of_walsh_averages():
    d = np.array([1.1, -0.3, 2.0, 0.4, 0.9])
    walsh = [(d[i] + d[j]) / 2 for i in range(5) for j in range(i, 5)]
    zero = np.zeros((5, 1))
    assert hodges_lehmann(zero, d[:, None]) == pytest.approx(np.median(walsh))


@pytest.mark.parametrize("shape", [(1, 32), (2, 23), (1, 33)])
@pytest.mark.parametrize("digits", [1, 15])
def test_hodges_lehmann_of_many_runs_is_the_median_of_walsh_averages(shape, digits):
    baseline, arm = np.round(rng(3).normal(5, 1, (2, *shape)), digits)
    d = (arm[:, :, None] - baseline[:, None, :]).ravel()
    assert len(d) > MAX_PAIRED
    walsh = np.add.outer(d, d)[np.triu_indices(len(d))] / 2
    assert hodges_lehmann(baseline, arm) == np.median(walsh)


def test_hodges_lehmann_of_300_runs_in_a_block_needs_little_memory():
    arm = rng(4).normal(0.2, 0.1, (1, 300))
    tracemalloc.start()
    estimate = hodges_lehmann(rng(5).normal(0, 0.1, (1, 300)), arm)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert estimate == pytest.approx(0.2, abs=0.03) and peak < 50e6


def test_hodges_lehmann_recovers_a_shift_under_block_effects_and_an_outlier():
    base = rng(1).normal(0, 1e-6, (6, 2)) + np.arange(6)[:, None]
    arm = base[:, ::-1] + 0.05
    arm[0, 0] += 9.0
    assert hodges_lehmann(base, arm) == pytest.approx(0.05, abs=1e-4)


def test_interval_of_pairs_is_hartigans_subset_means():
    d = rng(7).normal(0.1, 1.0, 9)
    means = sorted(
        np.mean([d[i] for i in subset])
        for size in range(1, 10)
        for subset in combinations(range(9), size)
    )
    k = int(0.05 * 2**9 / 2)
    low, high = confidence_interval(np.zeros((9, 1)), d[:, None])
    assert (low, high) == pytest.approx((means[k - 1], means[-k]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(3, 2), (4, 2), (6, 1), (7, 1)]))
def test_interval_inverts_the_test(seed, shape):
    baseline, arm = rng(seed).normal(0, 1, shape), rng(seed + 1).standard_t(2, shape)
    low, high = confidence_interval(baseline, arm)
    width = high - low
    for shift, inside in (
        (low + 1e-6 * width, True),
        (high - 1e-6 * width, True),
        (low - 1e-6 * width, False),
        (high + 1e-6 * width, False),
    ):
        assert (permutation_test(baseline, arm - shift) > 0.05) is inside
    assert low <= hodges_lehmann(baseline, arm) <= high


def test_no_interval_below_the_floor():
    assert confidence_interval(rng(1).normal(size=(2, 2)), rng(2).normal(size=(2, 2))) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-3, 3), st.floats(0.01, 100))
def test_adding_a_block_constant_scaling_and_swapping_change_what_they_should(seed, add, scale):
    baseline, arm = rng(seed).normal(0, 1, (4, 2)), rng(seed + 1).normal(0.5, 1, (4, 2))
    p, ci = permutation_test(baseline, arm), confidence_interval(baseline, arm)
    hl = hodges_lehmann(baseline, arm)
    block = add * np.arange(4)[:, None]
    assert permutation_test(baseline + block, arm + block) == pytest.approx(p)
    assert permutation_test(scale * baseline, scale * arm) == pytest.approx(p)
    assert permutation_test(arm, baseline) == pytest.approx(p)
    assert permutation_test(baseline[::-1, ::-1], arm[::-1]) == pytest.approx(p)
    assert confidence_interval(arm, baseline) == pytest.approx((-ci[1], -ci[0]))
    assert confidence_interval(baseline, arm + add) == pytest.approx((ci[0] + add, ci[1] + add))
    assert hodges_lehmann(arm, baseline) == pytest.approx(-hl)


def test_percent_and_log_are_inverse():
    assert to_percent(np.log(0.979)) == pytest.approx(-2.1)
    assert to_log_ratio(to_percent(0.3)) == pytest.approx(0.3)


def test_run_sd_takes_out_blocks_and_arm():
    base = np.array([[1.0, 1.2], [5.0, 5.2]])
    arm = base + 3.0
    # Residuals are all 0.1, four per block; 2 * 3 - 1 degrees of freedom are left.
    assert between_run_sd(base, arm) == pytest.approx(np.sqrt(8 * 0.01 / 5))
    assert between_run_sd(base[:1, :1], arm[:1, :1]) is None


def power_of(errors, critical, df, sd_df):
    """Return the power of ``errors`` estimated standard errors, averaged over both estimates."""
    steps = (np.arange(400) + 0.5) / 400
    own, others = (np.sqrt(stats.chi2.ppf(steps, f) / f) for f in (sd_df, df))
    return stats.norm.cdf(errors * own[:, None] - critical * others).mean()


@pytest.mark.parametrize("df", [5, 8, 11, 40])
@pytest.mark.parametrize("sd_df", [None, 4, 100])
@pytest.mark.parametrize("critical", [2.0, 3.5, 8.0])
def test_the_detectable_effect_has_eighty_percent_power_over_both_estimates_of_noise(
    df, sd_df, critical
):
    errors = detectable_errors(critical, df, sd_df)
    power = power_of(errors, critical, df, sd_df or df)
    assert 0.79 <= power <= 0.825 - (df >= 40) * 0.02  # Student's quantile for the normal one


def test_with_the_noise_known_the_detectable_effect_is_that_of_the_noncentral_t():
    errors = detectable_errors(stats.t.ppf(0.975, 11), 11, 10**6)
    assert stats.nct.sf(stats.t.ppf(0.975, 11), 11, errors) == pytest.approx(0.81, abs=5e-3)
    assert detectable_errors(2.0, 0) is detectable_errors(2.0, 8, 0) is None


def test_the_detectable_effect_is_in_percent_of_a_mean_difference():
    level = attained_alpha(4, 2, 0.05)
    errors = detectable_errors(stats.t.ppf(1 - level / 2, 11), 11)
    log_ratio = errors * 0.01 * np.sqrt(2 / 8)
    assert single_row_mde_pct(0.01, 4, 2, 0.05) == pytest.approx(to_percent(log_ratio))
    # For a row in a family: a smaller alpha of its own, and more is needed.
    assert mde_pct(0.01, 4, 2, 0.005) > 1.3 * mde_pct(0.01, 4, 2, 0.05)
    assert single_row_mde_pct(0.01, 4, 2, 0.05, 0.1) == mde_pct(0.01, 4, 2, 0.1 * level)
    assert single_row_mde_pct(0.01, 4, 2, 0.05, sd_df=3) > single_row_mde_pct(0.01, 4, 2, 0.05)
    assert single_row_mde_pct(0.01, 2, 2, 0.05) is None  # 2 / 36 is above 0.05


def test_the_attained_alpha_lies_between_two_levels_of_the_test():
    assert attained_alpha(6, 1, 0.05) == 1 / 64  # p is 2 / 64 or 4 / 64
    assert attained_alpha(8, 1, 0.05) == 11 / 256
    assert attained_alpha(4, 2, 0.02) == 23 / 1296
    assert attained_alpha(5, 1, 0.05) == 0.0  # p is at least 2 / 32
    assert attained_alpha(30, 1, 0.05) == pytest.approx(0.05, abs=2e-5)
    assert alpha_share(attained_alpha(8, 1, 0.03) / 4, 8, 1, 0.03) == pytest.approx(0.25)
    assert alpha_share(0.5, 8, 1, 0.03) == alpha_share(0.01, 5, 1, 0.05) == 1.0


def test_a_minute_holds_whole_blocks():
    assert one_minute_mde_pct(0.01, 10.0, 1) == single_row_mde_pct(0.01, 6, 1, 0.05)
    assert one_minute_mde_pct(0.01, 8.6, 1, 4) == single_row_mde_pct(0.01, 6, 1, 0.05, sd_df=4)
    assert one_minute_mde_pct(0.01, 10.1, 1) is None  # 5 pairs reach p = 2 / 32 at best
    assert one_minute_mde_pct(0.01, 20.0, 2) == single_row_mde_pct(0.01, 3, 2, 0.05)
    assert one_minute_mde_pct(0.01, 20.1, 2) is None
    assert one_minute_mde_pct(0.01, 61.0, 2) is None


def test_blocks_needed_is_the_smallest_number_that_detects_the_effect():
    need = blocks_needed(0.01, 2, 0.05, -1.0)
    assert single_row_mde_pct(0.01, need, 2, 0.05) <= to_percent(-to_log_ratio(-1.0))
    assert single_row_mde_pct(0.01, need - 1, 2, 0.05) > to_percent(-to_log_ratio(-1.0))
    assert blocks_needed(0.5, 1, 0.05, 0.1) is None
    assert blocks_needed(0.01, 2, 0.05, 0.0) is None


def test_thirty_rounds_for_one_percent_at_the_articles_noise():
    # "separating a 1% effect from 1.3% per-round noise takes about thirty rounds per arm"
    assert 25 <= blocks_needed(0.013, 1, 0.05, 1.0) <= 35


def test_holm():
    # Holm's own step-down, by hand: 0.01*4, 0.02*3, 0.03*2, max with what came before.
    assert holm([0.02, 0.01, 0.5, 0.03]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def values_with_probe(seed, blocks=10, runs=1, effect=0.01):
    """Return values that follow the probe, and the probe, both float64 [2, blocks, runs]."""
    probe = rng(seed).normal(0, 0.02, (2, blocks, runs))
    values = 0.8 * probe + rng(seed + 1).normal(0, 0.001, probe.shape)
    return values + np.array([0.0, effect])[:, None, None], probe


def residuals_on_probe(values, probe):
    """Return the residuals of a regression on the probe within blocks."""
    dv, dp = (x - x.mean(axis=(0, 2), keepdims=True) for x in (values, probe))
    return values - (dv * dp).sum() / (dp * dp).sum() * dp


def test_the_probe_s_part_is_removed_without_using_labels():
    values, probe = values_with_probe(1)
    adjusted = probe_adjusted(values, probe, 0.05)
    assert adjusted.effect == pytest.approx(0.01, abs=0.001)
    assert permutation_test(*values) > 0.05 > 0.01 > adjusted.p
    assert adjusted.p == pytest.approx(permutation_test(*residuals_on_probe(values, probe)))
    swapped = probe_adjusted(values[::-1], probe[::-1], 0.05)
    assert swapped.effect == pytest.approx(-adjusted.effect) and swapped.p == pytest.approx(
        adjusted.p
    )
    assert swapped.interval == pytest.approx((-adjusted.interval[1], -adjusted.interval[0]))
    assert probe_adjusted(values, np.ones_like(probe), 0.05) is None


@pytest.mark.parametrize(("blocks", "runs"), [(8, 1), (3, 2)])
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_probe_is_fitted_anew_at_every_shift(blocks, runs, seed):
    values, probe = values_with_probe(seed, blocks, runs)
    low, high = probe_adjusted(values, probe, 0.05).interval
    width = high - low
    for shift, inside in (
        (low + 1e-6 * width, True),
        (high - 1e-6 * width, True),
        (low - 1e-6 * width, False),
        (high + 1e-6 * width, False),
    ):
        moved = values - np.array([0.0, shift])[:, None, None]
        assert (permutation_test(*residuals_on_probe(moved, probe)) > 0.05) is inside


def test_noise_correlation_ignores_arms_and_blocks():
    noise, block = rng(1).normal(0, 0.02, (3, 6, 2)), np.arange(6)[None, :, None]
    assert noise_correlation(noise + 9 * block, noise + block) == pytest.approx(1.0)
    other = rng(2).normal(0, 0.02, (3, 6, 2))
    assert abs(noise_correlation(other + 9 * block, noise + block)) < 0.4
    # Any exchange of arms within a block, of value and probe alike, changes nothing.
    mixed = noise + 0.3 * other
    shuffled = [x.copy() for x in (mixed, noise)]
    for x in shuffled:
        x[:, 2] = x[::-1, 2, ::-1]
    assert noise_correlation(*shuffled) == pytest.approx(noise_correlation(mixed, noise))
    # An effect of an arm can only hide one.
    arm = 0.05 * np.arange(3)[:, None, None]
    assert abs(noise_correlation(mixed + arm, noise)) < abs(noise_correlation(mixed, noise))
    assert noise_correlation(noise, np.ones_like(noise)) == 0.0


def test_fisher_is_the_articles_p_of_one():
    # "three fast server processes that landed on both arms (Fisher p = 1.0)"
    assert fisher_p(1, 9, 2, 9) == pytest.approx(1.0)
    assert fisher_p(0, 8, 8, 8) == pytest.approx(2 / 12_870)


def test_two_modes_are_counted_and_tested():
    base = rng(1).normal(0, 0.004, 8)
    arm = rng(2).normal(-0.05, 0.004, 8)
    base[:2] += 0.06
    arm[0] += 0.06
    modes = find_modes({"base": base, "arm": arm}, "base")
    assert (modes.above_gap["base"], modes.above_gap["arm"]) == (2, 1)
    assert modes.fisher_p["arm"] == pytest.approx(1.0)
    assert modes.gap_pct == pytest.approx(6.0, abs=1.5)
    clean = {"base": rng(3).normal(size=8), "arm": rng(4).normal(9.0, 1.0, 8)}
    assert find_modes(clean, "base") is None


@pytest.mark.parametrize(("arms", "expected"), [(3, False), (4, True)])
def test_modes_need_at_least_eight_runs(arms, expected):
    values = {f"arm {i}": np.array([0.001 * i, 0.3 - 0.002 * i]) for i in range(arms)}
    assert (find_modes(values, "arm 0") is not None) == expected


def test_each_look_has_its_alpha_and_their_sum_is_bounded():
    looks = parse_looks([{"blocks": 4, "alpha": 0.02}, {"blocks": 8, "alpha": 0.03}], 0.05)
    assert [alpha_at(looks, b, 0.05) for b in (3, 4, 7, 8, 9)] == [0, 0.02, 0, 0.03, 0]
    assert alpha_at((), 3, 0.05) == 0.05
    assert withheld_reason(4, 4, looks, [4]) is None
    assert withheld_reason(6, 8, looks, []) == "no look was declared after 6 blocks"
    with pytest.raises(ValueError, match="spend more"):
        parse_looks([{"blocks": 4, "alpha": 0.04}, {"blocks": 8, "alpha": 0.03}], 0.05)
    with pytest.raises(ValueError, match="must increase"):
        parse_looks([{"blocks": 8, "alpha": 0.01}, {"blocks": 4, "alpha": 0.01}], 0.05)


def test_blocks_that_were_added_after_results_were_shown_claim_nothing():
    assert withheld_reason(4, 4, (), [4]) is None
    reason = "exploratory: blocks were added after results were shown (4 -> 6)"
    assert withheld_reason(6, 6, (), [4, 6]) == reason
    assert withheld_reason(7, 7, (), [4, 6, 7]).endswith("(4 -> 6 -> 7)")
    assert "3 of 4 blocks are done" in withheld_reason(3, 4, (), [])
    looks = parse_looks([{"blocks": 4, "alpha": 0.02}, {"blocks": 8, "alpha": 0.03}], 0.05)
    assert withheld_reason(8, 8, looks, [4, 8]) is None  # they were declared
    assert withheld_reason(8, 8, looks, [6, 8]).startswith("exploratory")


def test_the_worked_examples_of_the_permutation_test():
    results = doctest.testmod(permutation_module)
    assert results.attempted >= 10 and results.failed == 0
