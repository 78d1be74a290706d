"""Permuted blocks: balanced, uniformly random, and the same for the same seed."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from labkit.experiment import permuted_blocks
from labkit.experiment.permuted_blocks import schedule

ARMS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)


@given(ARMS, st.integers(1, 5), st.integers(1, 2), st.integers(0, 1 << 31))
def test_every_block_holds_every_arm_equally_often(arms, blocks, runs, seed):
    order = schedule(arms, blocks, runs, seed)
    assert len(order) == blocks * runs * len(arms)
    for block in range(blocks):
        here = [run for run in order if run.block == block]
        assert Counter(run.arm for run in here) == dict.fromkeys(arms, runs)
        assert [run.position for run in here] == list(range(len(here)))


@given(ARMS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 31))
def test_more_blocks_do_not_change_earlier_ones(arms, fewer, more, seed):
    grown = schedule(arms, fewer + more, 2, seed)
    assert grown[: fewer * 2 * len(arms)] == schedule(arms, fewer, 2, seed)
    assert schedule(arms[::-1], fewer + more, 2, seed) == grown


def orders_of(arms, blocks, seed):
    """Return the order of arms in each block, two runs of each."""
    arms_in_order = [run.arm for run in schedule(arms, blocks, 2, seed)]
    return list(zip(*[iter(arms_in_order)] * (2 * len(arms)), strict=True))


def test_every_order_is_as_likely_as_any_other():
    orders = Counter(orders_of("ab", 6000, seed=11))
    assert set(orders) == set(permutations("aabb"))
    assert chisquare(list(orders.values())).pvalue > 1e-3


def test_blocks_of_one_study_do_not_repeat_another_study_s():
    mine, yours = (orders_of("abcd", 20, seed) for seed in (1, 2))
    assert sum(m == y for m, y in zip(mine, yours, strict=True)) <= 2


@pytest.mark.parametrize("arms", [[], ["a", "a"]])
def test_no_arms_or_the_same_twice_is_refused(arms):
    with pytest.raises(ValueError, match="must be distinct"):
        schedule(arms, 1, 1, 0)
    with pytest.raises(ValueError, match="at least 1"):
        schedule(["a"], 1, 0, 0)


def test_the_worked_example_and_so_the_order_of_a_seed_never_change():
    results = doctest.testmod(permuted_blocks)
    assert results.attempted == 1 and results.failed == 0
