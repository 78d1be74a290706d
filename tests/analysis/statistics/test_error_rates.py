"""Simulated error rates with fixed seeds: the promised rates hold under realistic noise.

Noise is on the log scale, per process, with iterations inside: clean, drifting, with fast
and slow processes, with heavy tails. The last test shows that the usual method, a t-test
on pooled repeats, breaks the same promises on the same data.
"""

import numpy as np
import pytest
from scipy import stats

from labkit.analysis.statistics.difference_in_differences import effect_change, estimate_effect
from labkit.analysis.statistics.equivalence_test import equivalence_test
from labkit.analysis.statistics.hodges_lehmann import breakpoints, to_log_ratio
from labkit.analysis.statistics.interim_analysis import alpha_at, parse_looks
from labkit.analysis.statistics.permutation_test import (
    permutation_test,
    pool_by_block,
    relabellings,
)
from labkit.analysis.statistics.power import single_row_mde_pct
from labkit.analysis.statistics.probe_adjustment import probe_adjusted

KINDS = ("clean", "drifting", "modal", "heavy")
REPEATS = 20


def study(rng, kind, blocks=4, runs=2, effect=0.0, sd=0.005):
    """Simulate repeats: float64 [arms, blocks, runs, repeats]; arms: baseline and arm."""
    size = blocks * 2 * runs
    process = rng.normal(0, sd, size)
    if kind == "drifting":
        process += np.linspace(0, 0.05, size)
    if kind == "modal":
        process += 0.05 * (rng.random(size) < 0.25)
    if kind == "heavy":
        process += (rng.random(size) < 0.05) * rng.exponential(0.08, size)
    place = rng.permuted(np.tile(np.arange(2 * runs), (blocks, 1)), axis=1)
    in_order = process.reshape(blocks, 2 * runs)
    by_arm = np.take_along_axis(in_order, place, axis=1).reshape(blocks, 2, runs)
    means = by_arm.transpose(1, 0, 2) + np.array([0.0, effect])[:, None, None]
    return means[..., None] + rng.normal(0, 0.005, (*means.shape, REPEATS))


def run_values(repeats):
    return np.median(repeats, axis=-1)


def our_p(repeats):
    return permutation_test(*run_values(repeats))


def our_interval(repeats, alpha=0.05):
    base, arm = run_values(repeats)
    labels = relabellings(*base.shape)
    return breakpoints(
        labels.mean_differences(pool_by_block(base, arm)), labels.label_correlation
    ).interval(alpha)


def pooled_t(studies):
    """Return Welch's t-test of each study on its pooled repeats."""
    arms = np.array(studies).swapaxes(0, 1).reshape(2, len(studies), -1)
    return stats.ttest_ind(arms[1], arms[0], axis=1, equal_var=False)


def unchanged(kind, studies, blocks=4, runs=2):
    rng = np.random.default_rng([1, KINDS.index(kind), blocks, runs])
    return [study(rng, kind, blocks, runs) for _ in range(studies)]


def changed(kind, studies, blocks=4, runs=2):
    rng = np.random.default_rng([2, KINDS.index(kind), blocks, runs])
    return [study(rng, kind, blocks, runs, effect=0.03) for _ in range(studies)]


def type_one(p, kind, studies, blocks=4, runs=2):
    return np.mean([p(one) <= 0.05 for one in unchanged(kind, studies, blocks, runs)])


def coverage(interval, kind, studies, blocks=4, runs=2):
    limits = [interval(one) for one in changed(kind, studies, blocks, runs)]
    return np.mean([low <= 0.03 <= high for low, high in limits])


@pytest.mark.parametrize("kind", KINDS)
def test_type_one_error_and_coverage(kind):
    assert type_one(our_p, kind, 1000) <= 0.06
    assert coverage(our_interval, kind, 1000) >= 0.94


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("blocks", "runs"), [(3, 2), (4, 2), (6, 1), (10, 1)])
def test_type_one_error_and_coverage_of_many_designs(kind, blocks, runs):
    assert type_one(our_p, kind, 4000, blocks, runs) <= 0.06
    assert coverage(our_interval, kind, 4000, blocks, runs) >= 0.94


@pytest.mark.parametrize("kind", KINDS)
def test_the_t_test_on_pooled_repeats_breaks_these_promises(kind):
    assert np.mean(pooled_t(unchanged(kind, 300)).pvalue <= 0.05) > 0.06
    low, high = pooled_t(changed(kind, 300)).confidence_interval(0.95)
    assert np.mean((low <= 0.03) & (high >= 0.03)) < 0.94


def test_a_planted_effect_of_five_percent_is_found_at_one_percent_noise():
    rng = np.random.default_rng(3)
    detected = [our_p(study(rng, "clean", effect=0.05, sd=0.01)) <= 0.05 for _ in range(300)]
    assert np.mean(detected) >= 0.8


@pytest.mark.parametrize(("kind", "power"), [("drifting", 0.9), ("modal", 0.2), ("heavy", 0.5)])
def test_power_for_three_percent_under_other_noise(kind, power):
    rng = np.random.default_rng(4)
    detected = [our_p(study(rng, kind, effect=0.03)) <= 0.05 for _ in range(300)]
    assert np.mean(detected) >= power


def test_power_at_the_smallest_detectable_effect_is_80_percent():
    rng = np.random.default_rng(5)
    effect = to_log_ratio(single_row_mde_pct(0.01, 4, 2, 0.05, sd_df=1_000_000))  # known noise
    values = rng.normal(0, 0.01, (1000, 2, 4, 2)) + np.array([0, effect])[:, None, None]
    assert np.mean([permutation_test(*v) <= 0.05 for v in values]) == pytest.approx(0.8, abs=0.04)


def test_equivalence_at_the_margin_is_rarely_claimed_and_inside_it_often():
    rng = np.random.default_rng(6)
    labels = relabellings(4, 2)

    def claims(effect, studies=1500):
        claimed = 0
        for _ in range(studies):
            base, arm = run_values(study(rng, "clean", effect=effect))
            points = breakpoints(
                labels.mean_differences(pool_by_block(base, arm)), labels.label_correlation
            )
            claimed += equivalence_test(points, 2.0, 0.05).p <= 0.05
        return claimed / studies

    assert claims(to_log_ratio(2.0)) <= 0.04 and claims(to_log_ratio(-2.0)) <= 0.04
    assert claims(0.0) >= 0.9


def probe_study(rng, effect, sd=0.005, blocks=4, runs=2):
    """Simulate log values that follow the probe, both float64 [2, blocks, runs]."""
    mode = 0.05 * (rng.random((2, blocks, runs)) < 0.25)
    values = mode + rng.normal(0, sd, mode.shape)
    return values + np.array([0, effect])[:, None, None], mode + rng.normal(0, sd, mode.shape)


def test_probe_adjustment_stays_valid_and_gains_power():
    def rates(effect):
        rng, plain, adjusted = np.random.default_rng(8), 0, 0
        for _ in range(400):
            values, probe = probe_study(rng, effect)
            plain += permutation_test(*values) <= 0.05
            adjusted += probe_adjusted(values, probe, 0.05).p <= 0.05
        return plain / 400, adjusted / 400

    assert rates(0.0)[1] <= 0.07
    plain, adjusted = rates(0.02)
    assert adjusted > plain + 0.2


@pytest.mark.parametrize("sd", [0.002, 0.01])
def test_probe_adjusted_effects_are_unbiased_and_covered(sd):
    """With the probe fitted only at no effect, estimates were 9 % low and coverage 91.5 %."""
    rng, results = np.random.default_rng(11), []
    for _ in range(1500):
        results.append(probe_adjusted(*probe_study(rng, 0.03, sd), 0.05))
    assert np.mean([result.effect for result in results]) == pytest.approx(0.03, rel=0.02)
    inside = [
        result.interval is None or result.interval[0] <= 0.03 <= result.interval[1]
        for result in results
    ]
    assert np.mean(inside) >= 0.94
    assert np.mean([result.interval is None for result in results]) < 0.01


@pytest.mark.usefixtures("fewer_relabellings")
def test_looks_spend_at_most_alpha_and_naive_peeking_spends_more():
    looks = parse_looks([{"blocks": b, "alpha": 0.0125} for b in (4, 5, 6, 7)], 0.05)
    rng, claimed, naive = np.random.default_rng(9), 0, 0
    for _ in range(400):
        base, arm = run_values(study(rng, "modal", blocks=7))
        p = {look.blocks: permutation_test(base[: look.blocks], arm[: look.blocks])
             for look in looks}  # fmt: skip
        claimed += any(p[b] <= alpha_at(looks, b, 0.05) for b in p)
        naive += any(value <= 0.05 for value in p.values())
    assert claimed / 400 <= 0.06 < naive / 400


@pytest.mark.usefixtures("fewer_pairs")
@pytest.mark.parametrize("kind", KINDS)
def test_equal_studies_are_rarely_called_different(kind):
    """The second study's machine is 15 % slower, for which a t-test always claims a change."""
    rng, studies = np.random.default_rng([10, KINDS.index(kind)]), 600
    false, covered, runs = 0, 0, []
    for _ in range(studies):
        old, new = (run_values(study(rng, kind, effect=0.02)) for _ in range(2))
        new = new + 0.15
        before, after = (estimate_effect(*arms, None) for arms in (old, new))
        moved = estimate_effect(new[0], new[1] + 0.03, None)
        false += effect_change(before, after).p <= 0.05
        change = effect_change(before, moved)
        low, high = breakpoints(change.null_distribution, change.label_correlation).interval(0.05)
        covered += low <= 0.03 <= high
        runs.append([old[1].ravel(), new[1].ravel()])
    assert false / studies <= 0.07 and covered / studies >= 0.93
    naive = stats.ttest_ind(*np.swapaxes(runs, 0, 1), axis=1).pvalue <= 0.05
    assert np.mean(naive) > 0.95
