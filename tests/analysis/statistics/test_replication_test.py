"""Decisions on replicated effects: the words, their error rates, and what a decision would take."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.analysis.statistics.difference_in_differences import effect_change, estimate_effect
from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.permutation_test import relabellings
from labkit.analysis.statistics.replication_test import (
    ReplicationRow,
    decide_replication,
    region_of,
    times_as_long,
)

ALPHA, MARGIN = 0.05, (math.log1p(-0.02), math.log1p(0.02))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "benchmarks" / "replication_error_rates.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def study(effect, noise=0.004, blocks=7, seed=0):
    values = np.random.default_rng(seed).normal(0.0, noise, (2, blocks, 1))
    values[1] += effect
    one = estimate_effect(values[0], values[1], None)
    return one, breakpoints(
        one.null_distribution, relabellings(blocks, 1).label_correlation
    ).interval(ALPHA)


def row(author, reader, **noise):
    (first, limits), (second, here) = study(author), study(reader, seed=1, **noise)
    return ReplicationRow((first, second), effect_change(first, second), limits, here, MARGIN)


@pytest.mark.parametrize(
    ("author", "reader", "word"),
    [
        (0.2, 0.2, "replicated"),
        (0.2, 0.1, "same direction, other size"),
        (0.2, 0.4, "same direction, other size"),
        (0.2, -0.2, "not replicated"),
        (0.2, 0.0, "not replicated"),  # equivalent where the author had an effect
        (-0.2, -0.2, "replicated"),
        (-0.2, 0.1, "not replicated"),
        (0.0, 0.0, "replicated"),
        (0.0, 0.1, "not replicated"),
    ],
)
def test_a_row_s_word(author, reader, word):
    (decision,) = decide_replication([row(author, reader)], ALPHA)
    assert decision.word.value == word and decision.more is None
    assert decision.interval[0] < reader - author < decision.interval[1]


def test_the_margin_reaches_as_far_down_in_percent_as_up():
    """On the log scale -10 % is further from 0 than +10 %."""
    margin = (math.log1p(-0.1), math.log1p(0.1))
    (author, _), (reader, here) = study(-0.04), study(-0.03, seed=1)
    limits = (math.log1p(-0.095), math.log1p(0.031))
    one = ReplicationRow((author, reader), effect_change(author, reader), limits, here, margin)
    assert one.claims_none
    assert decide_replication([one], ALPHA)[0].word.value == "replicated"


def test_noise_leaves_a_row_undecided_and_says_how_long_it_would_take():
    found = [decide_replication([row(0.2, 0.2, noise=noise)], ALPHA)[0] for noise in (0.05, 0.1)]
    assert [one.word.value for one in found] == ["not decided"] * 2
    assert 1 < found[0].more < found[1].more
    assert decide_replication([row(0.2, 0.2)], 0.0)[0].word.value == "not decided"


def test_rows_are_adjusted_as_one_family():
    rows = [row(0.2, 0.215, noise=0.002)] + [row(0.2, 0.2)] * 9
    alone, together = (decide_replication(r, ALPHA)[0] for r in (rows[:1], rows))
    assert together.p_adjusted == pytest.approx(min(1.0, 10 * alone.p_adjusted))
    width = [one.interval[1] - one.interval[0] for one in (alone, together)]
    assert width[0] < width[1]


def test_the_region_comes_from_the_interval_and_the_margin_and_leaves_half_of_the_effect_out():
    author, _ = study(0.5, noise=1e-9)
    assert region_of(author, (0.45, 0.55), MARGIN) == pytest.approx(0.05 + MARGIN[1])
    half = 0.5 - math.log1p(math.expm1(0.5) / 2)
    assert region_of(author, (0.1, 0.9), MARGIN) == pytest.approx(half)
    loss, _ = study(-0.5, noise=1e-9)
    assert region_of(loss, (-0.9, -0.1), MARGIN) == pytest.approx(0.25)
    assert region_of(author, (-0.01, 0.01), MARGIN) == MARGIN[1]
    noisy, _ = study(0.5, noise=0.1)
    assert times_as_long(noisy, noisy, 0.02, ALPHA, is_equal=False) == math.inf
    assert 1 < times_as_long(noisy, noisy, 0.02, ALPHA, is_equal=True) < math.inf


@pytest.mark.parametrize(
    ("truth", "word", "most"),
    [("copy", "not replicated", 0.05), ("half", "replicated", 0.05), ("none", "replicated", 0.05)],
)
@pytest.mark.parametrize("effect", [0.05, 0.3])
def test_simulated_error_rates(benchmark, truth, word, most, effect):
    pair = benchmark.Pair(2, (6, 6), (0.01, 0.015), effect)
    found = benchmark.shares(pair, benchmark.TRUTHS[truth], 100, (7,))
    assert found[word] <= most
