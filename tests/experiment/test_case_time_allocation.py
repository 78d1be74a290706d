"""The division of a cell's time among processes and cases."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import Design, Isolation, PlannedLook
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks, planned_looks
from labkit.experiment.schedule.case_time_allocation import (
    LIKELY,
    MIN_ROUNDS_TO_DECIDE,
    Allocation,
    CasePilot,
    CaseShare,
    CellPilot,
    Measured,
    allocate,
    divide,
)
from labkit.experiment.schedule.pilot_and_allocation import allocation_of, lines_of

DESIGN = Design(blocks=0, time=120)
LIGHT = [CasePilot(f"light {i}", 0.01, 0.02, 0.05, 50) for i in range(3)]
HEAVY = CasePilot("heavy", 1.0, 1.5, 0.10, 3)


def shares(pilot, time_s, arms=1, blocks=None):
    allocation = allocate(pilot, DESIGN, arms, arms + 2, time_s, blocks)
    return allocation, {share.case: share for share in allocation.cases}


def test_cheap_cases_are_decided_and_the_one_out_of_reach_gets_a_few_rounds():
    allocation, by_case = shares(CellPilot(1.0, (HEAVY, *LIGHT)), 60)
    assert 30 < allocation.seconds <= 60
    assert all(by_case[case.case].p_decided >= LIKELY for case in LIGHT)
    assert by_case["heavy"].blocks == fewest_blocks(DESIGN, 1) < allocation.blocks
    assert by_case["heavy"].rounds == 1 and by_case["heavy"].needed_s > 60
    assert {by_case[case.case].blocks for case in LIGHT} == {allocation.blocks}


def test_arms_in_processes_of_their_own_vary_more_and_need_more_blocks():
    pilot = CellPilot(1.0, (CasePilot("noisy", 0.02, 0.02, 0.1, 50),))
    shared, apart = (
        allocate(pilot, replace(DESIGN, isolation=isolation), 1, 3, 60)
        for isolation in (Isolation.in_process, Isolation.live)
    )
    assert shared.cases[0].p_decided > 0.9 and apart.cases[0].p_decided < 0.8
    assert apart.blocks > shared.blocks and apart.cases[0].rounds < shared.cases[0].rounds


TURNS = Isolation.in_process


@pytest.mark.parametrize(
    ("isolation", "sweep", "roles", "forecasts"),
    [
        (TURNS, {}, ("baseline", "arm", "control"), True),
        (Isolation.live, {}, ("baseline", "arm", "control"), True),
        (Isolation.process, {}, ("baseline", "arm", "control"), False),
        (TURNS, {"engine.threads": [1, 2]}, ("baseline", "arm", "control"), False),
        (TURNS, {}, ("baseline", "control"), False),
    ],
)
def test_decisions_are_forecast_of_arms_that_are_compared_in_turns(
    isolation, sweep, roles, forecasts
):
    """Nobody asks whether the settings of a sweep, or a baseline and its copy, are equivalent."""
    design = replace(DESIGN, blocks=12, isolation=isolation)
    arms = [SimpleNamespace(role=role) for role in roles]
    cell = SimpleNamespace(design=design, counts_units=False, sweep=sweep, arms=arms)
    line, *_ = lines_of(cell, allocate(CellPilot(1.0, tuple(LIGHT)), design, 1, 3, 60), 60)
    assert ("expected to be decided" in line) == forecasts


def test_a_pilot_that_took_all_the_time_leaves_none():
    arms = [SimpleNamespace(role=role) for role in ("baseline", "arm", "control")]
    cell = SimpleNamespace(design=DESIGN, counts_units=False, sweep={}, arms=arms)
    allocation = allocate(CellPilot(1.0, tuple(LIGHT)), DESIGN, 1, 3, -8.0)
    *_, line = lines_of(cell, allocation, -8.0)
    assert line.startswith("this is longer than design.time, which leaves 0:00: ")


@pytest.mark.parametrize("time_s", [8 * 3600, None])
def test_no_block_takes_longer_than_its_processes_may(time_s):
    heavies = tuple(CasePilot(f"heavy {i}", 0.4, 0.5, 0.02 * (i + 1), 9) for i in range(10))
    design = replace(DESIGN, timeout_s=100)
    allocation = allocate(CellPilot(1.0, heavies), design, 1, 3, time_s)
    assert allocation.seconds / allocation.blocks <= 3 * 100 / 2


def test_with_enough_time_every_case_is_decided():
    allocation, by_case = shares(CellPilot(1.0, (HEAVY, *LIGHT)), 1200)
    assert allocation.expected_decisions > 3.5 and by_case["heavy"].p_decided >= LIKELY
    unlimited, _ = shares(CellPilot(1.0, (HEAVY, *LIGHT)), None)
    assert unlimited.expected_decisions > 3.5 and math.isfinite(unlimited.seconds)


def test_the_last_look_has_the_alpha_that_the_earlier_ones_leave():
    """A plan of design=sequential, whose last look has 0.02 of 0.05, counted on 0.04."""
    early = [PlannedLook(blocks, 0.01) for blocks in (8, 12, 20)]
    pilot, needed = CellPilot(1.0, (replace(HEAVY, sd=0.2),)), []
    for looks, blocks in ((early, 30), ([], 30), ([], 0)):
        design = replace(DESIGN, blocks=blocks, looks=looks)
        (share,) = divide(pilot, design, 1, 1, 600, 30).cases
        needed.append(share.needed_s)
    sequential, typed, of_time = needed
    assert sequential > of_time > typed


def test_blocks_up_to_a_look_have_the_alpha_of_that_look():
    """A study that may grow to the look after 16 blocks counted on that look's alpha after 8."""
    pilot = CellPilot(1.0, (replace(HEAVY, sd=0.2),))
    looks = [PlannedLook(8, 0.01), PlannedLook(16, 0.04)]
    begun, alone = replace(DESIGN, blocks=8, looks=looks), replace(DESIGN, blocks=8, alpha=0.01)
    assert divide(pilot, begun, 1, 1, 600, 8) == divide(pilot, alone, 1, 1, 600, 8)


def test_the_rounds_of_a_sweep_give_each_setting_every_position_equally_often():
    cell = SimpleNamespace(
        design=replace(DESIGN, blocks=12), blocks_from_time=False, counts_units=False,
        tested_arms=1, arms=[None] * 9,
    )  # fmt: skip
    pilot = CellPilot(1.0, (CasePilot("long", 0.1, 0.1, 0.05, 20), *LIGHT))
    rounds = [share.rounds for share in allocation_of(cell, pilot, 300).cases]
    assert all(count % 9 == 0 for count in rounds), rounds


def test_equal_cases_get_equal_rounds_and_noisier_ones_more():
    noisy = [replace(LIGHT[0], case="noisy", sd=0.10), *LIGHT]
    _, by_case = shares(CellPilot(0.5, tuple(noisy)), 60)
    rounds = [by_case[case.case].rounds for case in LIGHT]
    assert max(rounds) - min(rounds) <= 1 and by_case["noisy"].rounds > 2 * max(rounds)


def test_the_cheapest_are_decided_first_and_the_next_one_gets_a_good_part_or_nothing():
    heavies = [replace(HEAVY, case=f"heavy {i}", round_s=0.3 + 0.1 * i, sd=0.03) for i in range(4)]
    pilot = CellPilot(0.5, (*heavies, *LIGHT))
    reached = []
    for time_s in range(40, 400, 8):
        _, by_case = shares(pilot, time_s, blocks=10)
        rounds = [by_case[case.case].rounds for case in heavies]
        assert sorted(rounds, reverse=True) == rounds
        assert all(count == 1 or count >= 2 for count in rounds)
        reached.append(sum(count > 1 for count in rounds))
    assert reached[0] < 2 and reached[-1] == 4 and len(set(reached)) > 3


def test_what_finished_blocks_lack_the_others_make_up_for():
    pilot, few = CellPilot(0.5, (HEAVY, *LIGHT)), {LIGHT[0].case: [9] * 6, LIGHT[1].case: [60] * 6}
    measured = Measured(6, few, {HEAVY.case, LIGHT[2].case})
    behind, ahead = divide(pilot, DESIGN, 1, 3, None, 12, measured).cases
    assert (behind.case, ahead.case) == (LIGHT[0].case, LIGHT[1].case)
    assert behind.rounds > 2 * ahead.rounds and behind.blocks == ahead.blocks == 12


def test_rounds_of_microseconds_are_more_than_their_noise_asks_for():
    """A disturbance of some milliseconds is not to be all that a process has of a case."""
    tiny = CasePilot("tiny", 0.0005, 0.001, 0.02, 200)
    _, by_case = shares(CellPilot(0.5, (tiny, replace(HEAVY, sd=0.03), *LIGHT)), 100, blocks=12)
    assert by_case["heavy"].rounds < 12  # it takes all that is left
    assert by_case["tiny"].rounds > 3 * MIN_ROUNDS_TO_DECIDE


@pytest.mark.parametrize("time_s", [60, 120, 240])
def test_time_that_nobody_needs_is_spent_as_far_as_it_is_of_use(time_s):
    pilot = CellPilot(0.5, (LIGHT[0], replace(LIGHT[1], round_s=0.2), replace(LIGHT[2], sd=0.2)))
    allocation, _ = shares(pilot, time_s, blocks=12)
    assert time_s - 12 * 3 * 0.2 < allocation.seconds <= time_s
    longer, _ = shares(CellPilot(0.5, tuple(LIGHT)), 10 * time_s, blocks=12)
    assert longer.seconds < 90 and {share.rounds for share in longer.cases} == {207}


def test_processes_that_are_slow_to_start_are_fewer():
    few, many = (shares(CellPilot(start_s, tuple(LIGHT)), 60)[0].blocks for start_s in (6.0, 0.1))
    assert few < many


def test_a_fixed_number_of_blocks_stays():
    allocation, by_case = shares(CellPilot(1.0, tuple(LIGHT)), 20, blocks=4)
    assert allocation.blocks == 4 and allocation.seconds <= 20
    assert all(share.blocks == 4 for share in by_case.values())


def test_too_little_time_still_gives_the_fewest_blocks_that_can_claim_something():
    allocation, _ = shares(CellPilot(5.0, (HEAVY,)), 10)
    assert allocation.blocks == fewest_blocks(DESIGN, 1) and allocation.seconds > 10


@pytest.mark.parametrize(("arms", "blocks"), [(1, 6), (2, 7), (3, 8), (15, 10), (16, 10)])
def test_more_arms_need_more_blocks(arms, blocks):
    assert fewest_blocks(DESIGN, arms) == blocks
    assert arms * DESIGN.smallest_p(blocks) <= 0.8 * DESIGN.alpha


def test_a_look_must_be_able_to_claim_something_and_its_alpha_is_part_of_all():
    assert planned_looks(DESIGN, 1, 9) == []
    first, last = planned_looks(DESIGN, 1, 12)
    assert (first.blocks, last.blocks) == (8, 12)
    assert first.alpha + last.alpha == pytest.approx(DESIGN.alpha)
    assert 16 * DESIGN.smallest_p(planned_looks(DESIGN, 16, 16)[0].blocks) <= first.alpha
    assert planned_looks(DESIGN, 16, 14) == []  # after 12 of 14, it would save little


def test_three_rounds_of_a_case_do_not_make_it_noiseless():
    calm = replace(HEAVY, sd=0.0)
    pooled = CellPilot(1.0, (calm, *LIGHT)).pooled
    assert 0.03 < pooled.cases[0].sd < LIGHT[0].sd
    assert pooled.cases[1].sd == pytest.approx(LIGHT[0].sd)


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 3), st.floats(1e-4, 3), st.floats(0, 0.5)),
        min_size=1,
        max_size=12,
    ),
    st.floats(0.1, 10),
    st.floats(20, 2000),
    st.integers(1, 16),
)
def test_a_study_takes_its_time_or_the_least_that_can_claim_something(cases, start_s, time_s, arms):
    pilots = tuple(CasePilot(str(i), *case, 5) for i, case in enumerate(cases))
    allocation = allocate(CellPilot(start_s, pilots), DESIGN, arms, arms + 2, time_s)
    least = fewest_blocks(DESIGN, arms)
    least_s = least * (start_s + sum(case.warm_up_s + case.round_s for case in pilots))
    assert allocation.seconds <= max(time_s, least_s) * (1 + 1e-9)
    assert allocation.blocks >= least
    for share in allocation.cases:
        assert share.rounds >= 1 and least <= share.blocks <= allocation.blocks
        assert share.blocks == allocation.blocks or share.rounds < MIN_ROUNDS_TO_DECIDE


def test_a_case_with_more_than_half_of_the_blocks_is_no_estimate():
    shares = tuple(CaseShare(str(blocks), blocks, 1, 0.0, 5.0) for blocks in (6, 8, 9, 16))
    assert Allocation(16, shares, 60.0).estimates(6).keys() == {"6", "8"}
    assert Allocation(6, shares[:1], 60.0).estimates(6) == {}
    assert Allocation(9, shares[:2], 60.0).estimates(8).keys() == {"6", "8"}
