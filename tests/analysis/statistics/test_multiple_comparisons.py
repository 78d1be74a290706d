"""Families of rows: known answers for adjusted p-values and intervals.

Each row has its own noise: if all rows shared theirs, adjusted p-values would equal raw ones and
no test could fail.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shift_interval import confidence_interval

from labkit.analysis.statistics.equivalence_test import equivalence_test
from labkit.analysis.statistics.multiple_comparisons import (
    JOINT_DRAWS,
    InvertedTest,
    RowPermutations,
    joint_p_values,
    max_of_other_rows,
    per_row_alphas,
)
from labkit.analysis.statistics.permutation_test import (
    RESAMPLING_SEED,
    permutation_test,
    pool_by_block,
    relabellings,
)

SHAPES = st.sampled_from([(3, 2), (4, 2), (6, 1), (8, 1)])
SEEDS = st.integers(0, 10_000)


def make_tests(baseline, arm, labels=None):
    """Return the tests of a family, from float64 [blocks, runs, rows]."""
    blocks, runs, rows = baseline.shape
    labels = relabellings(blocks, runs) if labels is None else labels
    units = pool_by_block(baseline, arm)
    statistics = labels.half_differences(units).T
    within = units.reshape(blocks, 2 * runs, rows)
    squares = ((within - within.mean(axis=1, keepdims=True)) ** 2).sum(axis=(0, 1))
    return [RowPermutations(labels, t, float(q)) for t, q in zip(statistics, squares, strict=True)]


def regions(tests, times=1):
    others = max_of_other_rows(tests)
    return [test.inverted_test(rest, times) for test, rest in zip(tests, others, strict=True)]


def draw(seed, shape, rows=3, effect=0.0):
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(0, 1, (2, *shape, 1)), rng.normal(0, 1, (2, *shape, rows))
    values = shared + own
    values[1, ..., 0] += effect
    return values


@settings(max_examples=30, deadline=None)
@given(SEEDS, SHAPES)
def test_one_row_is_the_plain_test_and_its_interval(seed, shape):
    base, arm = draw(seed, shape, rows=1, effect=1.0)
    (test,) = make_tests(base, arm)
    region = test.inverted_test()
    assert region.p(0.0) == pytest.approx(permutation_test(base[..., 0], arm[..., 0]))
    assert region.p(0.7) == pytest.approx(permutation_test(base[..., 0], arm[..., 0] - 0.7))
    assert region.interval(0.05) == pytest.approx(confidence_interval(base[..., 0], arm[..., 0]))


@pytest.mark.parametrize("shape", [(3, 2), (6, 1)])
def test_adjusted_p_counts_own_and_other_rows(shape):
    values = draw(4, shape, rows=3, effect=1.5)
    units = pool_by_block(*values)
    labels = relabellings(*shape)
    t = labels.mean_differences(units)
    effect = units[:, :] - np.outer(np.tile(np.repeat([0, 1], shape[1]), shape[0]), t[0])
    rest = labels.mean_differences(effect)
    rest /= rest.std(axis=0)
    for i, region in enumerate(regions(make_tests(*values))):
        own = np.abs(t[:, i]) >= abs(t[0, i]) - 1e-12
        observed = abs(t[0, i]) / t[:, i].std()
        others = np.abs(np.delete(rest, i, axis=1)).max(axis=1) >= observed
        assert region.p(0.0) == pytest.approx(np.mean(own | others))
        assert own.mean() < np.mean(own | others)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, st.sampled_from([0.05, 0.01, 0.2]), st.sampled_from([1, 3]))
def test_the_interval_inverts_the_adjusted_test_and_never_contradicts_it(seed, shape, alpha, times):
    values = draw(seed, shape, effect=2.0)
    for i, region in enumerate(regions(make_tests(*values), times)):
        limits = region.interval(alpha)
        assert (limits is None) == (
            times * 2 / relabellings(*shape).count > alpha
        ) or limits is None
        if limits is None:
            continue
        low, high = limits
        width = high - low
        for shift, inside in (
            (low + 1e-6 * width, True),
            (high - 1e-6 * width, True),
            (low - 1e-6 * width, False),
            (high + 1e-6 * width, False),
        ):
            moved = values.copy()
            moved[1, ..., i] -= shift
            moved_region = regions(make_tests(*moved), times)[i]
            assert (moved_region.p(0.0) > alpha) is inside
        assert (region.p(0.0) <= alpha) == (low > 0 or high < 0)


def test_a_family_is_wider_than_a_row_and_copied_rows_cost_little():
    values = draw(2, (5, 2), rows=6, effect=1.0)
    tests = make_tests(*values)
    for test, region in zip(tests, regions(tests), strict=True):
        alone = test.inverted_test()
        assert region.p(0.0) >= alone.p(0.0)
        (low, high), (inner, outer) = region.interval(0.05), alone.interval(0.05)
        assert low < inner and high > outer
    wide, few, alone = (
        region.interval(0.05)
        for region in (
            regions(tests)[0],
            regions(make_tests(*np.repeat(values[..., :1], 6, axis=-1)))[0],
            tests[0].inverted_test(),
        )
    )
    cost = [(high - low) / (alone[1] - alone[0]) - 1 for low, high in (wide, few)]
    assert cost[0] > 0.2 and cost[1] < cost[0] / 2
    # However many copies there are.
    assert regions(make_tests(*np.repeat(values[..., :1], 2, axis=-1)))[0].interval(0.05) == few


def test_rows_of_any_scale_count_alike():
    values = draw(3, (4, 2), rows=4, effect=1.0)
    scale = np.array([1.0, 1000.0, 1e-3, 5.0])
    plain, scaled = regions(make_tests(*values)), regions(make_tests(*(values * scale)))
    for one, other, factor in zip(plain, scaled, scale, strict=True):
        assert other.p(0.0) == one.p(0.0)
        assert other.interval(0.05) == pytest.approx(np.array(one.interval(0.05)) * factor)


def test_an_effect_in_one_row_moves_no_other_interval():
    values = draw(5, (6, 1), rows=3)
    moved = values.copy()
    moved[1, ..., 0] += 7.0
    one, other = regions(make_tests(*values)), regions(make_tests(*moved))
    assert other[0].interval(0.05) == pytest.approx(np.array(one[0].interval(0.05)) + 7.0)
    for i in (1, 2):
        assert other[i].interval(0.05) == pytest.approx(one[i].interval(0.05))


def test_arms_share_alpha():
    tests = make_tests(*draw(6, (4, 2), effect=1.0))
    one, three = regions(tests), regions(tests, times=3)
    for alone, shared in zip(one, three, strict=True):
        assert shared.p(0.0) == pytest.approx(min(1.0, 3 * alone.p(0.0)))
        assert shared.interval(0.06) == alone.interval(0.02)


def test_a_row_that_lacks_a_block_is_tested_on_its_own_blocks():
    values = draw(7, (4, 2), rows=2)
    labels = relabellings(4, 2).restrict_to_blocks([0, 1, 3])
    remaining = np.delete(values, 2, axis=1)[..., :1]
    (short,) = make_tests(*remaining, labels=labels)
    p = permutation_test(*remaining[..., 0])
    assert short.inverted_test().p(0.0) == pytest.approx(p)
    family = regions([short, make_tests(*values)[1]])
    assert family[0].p(0.0) > p and len(family[0].lower_breakpoints) == 1296 // 2


def test_rows_on_fewer_blocks_share_each_relabelling_with_the_others():
    labels = relabellings(3, 2)
    units = np.random.default_rng(1).normal(size=12)
    remaining = np.concatenate([units[:4], units[8:]])
    alone = labels.restrict_to_blocks([0, 2]).mean_differences(remaining)
    zeroed = labels.mean_differences(np.where((np.arange(12) // 4) == 1, 0.0, units))
    assert alone == pytest.approx(zeroed * 3 / 2)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", [1, 2])
def test_ties_do_not_depend_on_rounding(seed, rows):
    """Sums of whole numbers are exact; those of tenths are rounded, and must tie all the same."""
    values = np.random.default_rng(seed).integers(0, 4, (2, 4, 2, rows)).astype(float)
    values[1] += 1
    whole, tenths = (make_tests(*(scale * values)) for scale in (1.0, 0.1))
    for exact, rounded in zip(regions(whole), regions(tenths), strict=True):
        for shift in range(-2, 5):
            if shift != exact.mean_difference:  # where p is 1, on either side
                assert rounded.p(0.1 * shift) == exact.p(shift)
                assert rounded.p_greater(0.1 * shift) == exact.p_greater(shift)
                assert rounded.p_less(0.1 * shift) == exact.p_less(shift)
    for exact, rounded in zip(whole, tenths, strict=True):
        assert np.array_equal(rounded.at_least_observed, exact.at_least_observed)


@pytest.mark.parametrize("seed", range(8))
def test_ties_of_small_differences_of_large_logarithms_count(seed):
    """Bytes of memory that differ by a few blocks: their logarithms are near 18."""
    values = np.random.default_rng(seed).integers(-2, 4, (2, 10, 1, 1)).astype(float)
    (whole,), (small,) = (make_tests(*scaled) for scaled in (values, 18 + 1e-4 * values))
    ((exact,), (rounded,)) = regions([whole]), regions([small])
    assert rounded.p(0.0) == exact.p(0.0)
    assert np.array_equal(small.at_least_observed, whole.at_least_observed)


def test_ties_count_in_a_joint_p():
    """The smallest p has a relabelling and its mirror image, and a row's own ties count."""
    baseline = np.random.default_rng(2).integers(0, 3, (4, 2, 1)).astype(float)
    for arm in (baseline[::-1] + 9, baseline[:, ::-1] + np.array([[[0.0]], [[1.0]]] * 2)):
        (test,) = make_tests(0.1 * baseline, 0.1 * arm)
        ((joint,),) = joint_p_values([[test]])
        draws = np.random.default_rng([RESAMPLING_SEED, 1]).integers(1296, size=JOINT_DRAWS)
        draws[0] = 0
        units = pool_by_block(0.1 * baseline, 0.1 * arm)
        sizes = np.round(np.abs(test.labels.mean_differences(units)) * 80)[:, 0]  # of 8 tenths
        assert joint == np.mean(sizes[draws] >= sizes[0]) > 1e-5


def test_rows_that_tie_with_the_observed_row_count_in_a_joint_p():
    """The second row holds the first one's values, labelled so that their means are equal."""
    first = np.arange(12.0).reshape(3, 4)
    values = np.stack([first, first[:, [0, 3, 1, 2]]], axis=-1)
    tests = make_tests(values[:, :2], values[:, 2:])
    units = pool_by_block(values[:, :2], values[:, 2:])
    own, other = np.abs(tests[0].labels.mean_differences(units)).T
    assert other[0] == 0.0
    draws = np.random.default_rng([RESAMPLING_SEED, 1]).integers(216, size=JOINT_DRAWS)
    draws[0] = 0
    ((joint, _),) = joint_p_values([tests])
    reached = (own >= own[0]) | (other >= own[0])
    assert joint == np.mean(reached[draws]) > np.mean((own >= own[0])[draws])


def test_one_sided_p_values_are_half_of_the_two_sided_on_their_own_side_alone():
    (region,) = regions(make_tests(*draw(3, (4, 2), rows=1, effect=1.0)))
    low, high = region.interval(0.05)
    for limit, outside in ((low, low - 0.1), (high, high + 0.1)):
        assert 0 < region.p(outside) <= 0.05 < region.p(limit)
    assert (region.p_greater(low - 0.1), region.p_less(low - 0.1)) == (region.p(low - 0.1) / 2, 1)
    assert (region.p_less(high + 0.1), region.p_greater(high + 0.1)) == (
        region.p(high + 0.1) / 2,
        1,
    )


def test_an_interval_s_rank_is_exact_whatever_the_rounding():
    """0.018 * 100,000 is just below 1,800 in floating point."""
    assert 0.018 * 100_000 < 1800
    region = InvertedTest(0.0, np.arange(-100_000.0, 0.0), np.arange(1.0, 100_001.0))
    assert region.interval(0.018) == (-98_200.0, 98_200.0)


def test_rows_without_noise():
    base = np.zeros((4, 2, 2))
    arm = base + np.array([0.5, 0.0])
    shifted, same = regions(make_tests(base, arm))
    assert shifted.interval(0.05) == (0.5, 0.5)
    assert shifted.p(0.0) <= 0.05 and same.p(0.0) == 1.0


def test_equivalence_is_the_shown_interval_within_the_margin():
    tests = make_tests(*(0.01 * draw(8, (4, 2), rows=3)))
    for region in regions(tests):
        low, high = region.interval(0.05)
        bound = 100 * max(np.expm1(high), -np.expm1(low))
        for margin, inside in ((bound * 1.01, True), (bound * 0.99, False)):
            equivalence = equivalence_test(region, margin, 0.05)
            assert (equivalence.p <= 0.05) is inside
            assert equivalence.bound_pct == pytest.approx(bound)
    assert equivalence_test(region, 1e-6, 0.05).p == 1.0  # the effect itself lies outside


def test_a_row_s_alpha_follows_from_its_family():
    rng = np.random.default_rng(9)
    independent = make_tests(*rng.normal(0, 1, (2, 8, 1, 10)))
    copies = make_tests(*np.repeat(rng.normal(0, 1, (2, 8, 1, 1)), 10, axis=-1))
    (alone,) = per_row_alphas(copies[:1], 0.05)
    assert alone == pytest.approx(0.05, abs=0.02)
    assert per_row_alphas(copies, 0.05) == pytest.approx([alone] * 10)
    assert all(0.002 < alpha < 0.012 for alpha in per_row_alphas(independent, 0.05))
    assert per_row_alphas(independent, 0.001) == [0.0] * 10  # 2 / 256 is all that there is


def test_the_joint_p_over_cells_matches_its_definition():
    """Computes every cell's largest statistic under every joint draw, all in memory."""
    cells = [make_tests(*draw(seed, (4, 2), rows=3, effect=2.0)) for seed in range(4)]
    rng = np.random.default_rng([RESAMPLING_SEED, len(cells)])
    draws = [rng.integers(tests[0].labels.count, size=JOINT_DRAWS) for tests in cells]
    for i, (each, tests) in enumerate(zip(draws, cells, strict=True)):
        each[0] = 0
        draws[i] = tests[0].labels.rows_of(each)
    sizes = {
        (i, j): test.residual_statistics[draws[i]]
        for i, tests in enumerate(cells)
        for j, test in enumerate(tests)
    }
    for (i, j), p in zip(sizes, [p for ps in joint_p_values(cells) for p in ps], strict=True):
        test = cells[i][j]
        others = np.max([size for place, size in sizes.items() if place != (i, j)], axis=0)
        against = test.at_least_observed[draws[i]] | (
            others >= test.observed_statistic * (1.0 - 1e-12)
        )
        assert p == float(np.mean(against))


def test_cells_are_one_family_of_joint_relabellings():
    values = draw(5, (4, 2), rows=3, effect=4.0)
    tests = make_tests(*values)
    (alone,) = joint_p_values([tests])
    assert alone == pytest.approx([region.p(0.0) for region in regions(tests)], abs=0.01)
    both = joint_p_values([tests, make_tests(*draw(6, (4, 2), rows=5))])
    assert [len(cell) for cell in both] == [3, 5]
    assert all(joint >= single - 0.005 for joint, single in zip(both[0], alone, strict=True))
    assert both[0][1] > alone[1] + 0.02
    assert both[0][0] < 0.02
