"""Changes of an effect between two studies: known answers, limits and symmetries."""

import numpy as np
import pytest

from labkit.analysis.statistics.difference_in_differences import (
    MIN_RESIDUAL_DF,
    effect_change,
    estimate_effect,
)
from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.power import between_run_sd, degrees_of_freedom


def draw(seed, blocks, runs, sd=1.0):
    """Return the baseline's and the arm's log values and log probes, each [blocks, runs]."""
    rng = np.random.default_rng(seed)
    values, probes = rng.normal(0, sd, (2, 2, blocks, runs))
    return values + probes, probes


def effect(seed, blocks=3, runs=2, with_probe=False, moved=0.0, sd=1.0):
    (baseline, arm), probes = draw(seed, blocks, runs, sd)
    return estimate_effect(baseline, arm + moved, tuple(probes) if with_probe else None)


@pytest.mark.parametrize(("blocks", "runs"), [(3, 2), (6, 1), (2, 3)])
def test_an_effect_has_the_variance_of_a_mean_difference(blocks, runs):
    values, _ = draw(1, blocks, runs)
    one = estimate_effect(*values, None)
    assert one.degrees_of_freedom == degrees_of_freedom(blocks, runs)
    assert one.variance == pytest.approx(between_run_sd(*values) ** 2 * 2 / (blocks * runs))


@pytest.mark.parametrize(("blocks", "used"), [(9, False), (10, True)])
def test_a_probe_costs_a_degree_of_freedom_and_needs_eight_to_remain(blocks, used):
    with_probe, without = (effect(2, blocks, 1, known) for known in (True, False))
    assert (without.degrees_of_freedom, MIN_RESIDUAL_DF) == (blocks - 1, 8)
    assert with_probe.degrees_of_freedom == blocks - 1 - used
    same = np.array_equal(with_probe.null_distribution, without.null_distribution)
    assert same is not used


def test_a_change_has_the_variances_and_degrees_of_freedom_of_both_studies():
    old, new = effect(1), effect(2, blocks=2, sd=3.0)
    change = effect_change(old, new)
    assert change.degrees_of_freedom == old.degrees_of_freedom + new.degrees_of_freedom == 8 + 5
    assert change.variance == old.variance + new.variance
    assert change.smallest_p == 2 / (216 * 36)


def test_a_change_is_detectable_down_to_the_smallest_p_and_with_degrees_of_freedom():
    change = effect_change(effect(1), effect(2))
    assert change.mde_pct(change.smallest_p) > change.mde_pct(0.05) > 0
    assert change.mde_pct(change.smallest_p * 0.999) is None
    single = effect_change(effect(1, blocks=1, runs=1), effect(2, blocks=1, runs=1))
    assert single.degrees_of_freedom == 0 and single.smallest_p == 0.5
    assert single.mde_pct(0.9) is None


@pytest.mark.parametrize(("blocks", "runs"), [(3, 2), (1, 1)])
def test_swapping_the_studies_mirrors_the_change(blocks, runs):
    old, new = (effect(seed, blocks, runs, moved=seed) for seed in (1, 2))
    change, mirrored = effect_change(old, new), effect_change(new, old)
    assert np.sort(change.null_distribution) == pytest.approx(np.sort(-mirrored.null_distribution))
    assert change.estimate == -mirrored.estimate and change.p == mirrored.p


@pytest.mark.parametrize("seed", range(3))
def test_studies_of_unknown_or_no_variance_count_alike(seed):
    """Only the observed labels of both studies and their mirror image reach the change."""
    single = effect_change(effect(seed, blocks=1, runs=1), effect(seed + 5, blocks=1, runs=1))
    assert np.isnan(single.variance) and single.p == single.smallest_p == 0.5
    flat = np.full((3, 2), 1.0)
    constant = effect_change(*(estimate_effect(flat, flat + seed + x, None) for x in (1, 9)))
    assert constant.variance == pytest.approx(0, abs=1e-30) and constant.p == constant.smallest_p


@pytest.mark.parametrize(("blocks", "runs", "with_probe"), [(3, 2, False), (10, 1, True)])
@pytest.mark.parametrize("seed", range(4))
def test_the_interval_inverts_the_test(blocks, runs, with_probe, seed):
    old = effect(seed, blocks, runs, with_probe)

    def change(shift):
        return effect_change(old, effect(seed + 9, blocks, runs, with_probe, 2 - shift, 0.5))

    low, high = breakpoints(change(0).null_distribution, change(0).label_correlation).interval(0.05)
    assert low < change(0).estimate < high
    tiny = 1e-6 * (high - low)
    for shift, inside in (
        (low + tiny, True),
        (high - tiny, True),
        (low - tiny, False),
        (high + tiny, False),
    ):
        assert (change(shift).p > 0.05) is inside


@pytest.mark.parametrize("seed", range(4))
def test_ties_count_as_reached_whatever_the_rounding(seed):
    """Relabellings that tie exactly in whole numbers also tie in tenths, whose sums are rounded."""
    values = np.random.default_rng(seed).integers(0, 4, (2, 2, 3, 2)).astype(float)
    values[:, 1] += [[[2]], [[4]]]
    whole, tenths = (
        effect_change(*(estimate_effect(*study, None) for study in scale * values))
        for scale in (1.0, 0.1)
    )
    assert tenths.p == whole.p
