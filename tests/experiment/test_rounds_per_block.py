"""The time that blocks have left, divided before each of them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.config import Design
from labkit.experiment.schedule import rounds_per_block
from labkit.experiment.schedule.case_time_allocation import (
    MIN_ROUNDS_TO_DECIDE,
    CasePilot,
    CellPilot,
    allocate,
)
from labkit.experiment.schedule.rounds_per_block import RoundPlanner
from labkit.records import CaseRecord, Metric

LIGHT = CasePilot("light", 0.02, 0.03, 0.04, 30)
HEAVY = CasePilot("heavy", 0.30, 0.40, 0.03, 3)
PILOT = CellPilot(0.5, (LIGHT, HEAVY))


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which the blocks of a study move on."""
    now = [100.0]
    monkeypatch.setattr(rounds_per_block.time, "monotonic", lambda: now[0])
    return now


class Study:
    """A study whose launches are drawn: ``sds``, the noise of a round by case."""

    def __init__(self, now, pilot, time_s, sds, slowness=1.0, blocks=None, shift=0.0):
        self.now, self.sds, self.slowness, self.shift = now, sds, slowness, shift
        self.rng, self.began = np.random.default_rng(5), now[0]
        design = Design(time=time_s, blocks=0)
        planned = blocks or allocate(pilot.pooled, design, 1, 3, time_s).blocks
        self.cell = SimpleNamespace(
            design=replace(design, blocks=planned),
            tested_arms=1,
            arms=("base", "x", "control"),
            cases_of=list,
        )
        self.planner = RoundPlanner(self.cell, pilot, now[0] + time_s)
        self.plans = []

    def records(self, block, rounds):
        """Return a block's records; arm x is ``shift`` slower."""
        drift = {case: self.rng.normal(0, 0.2, count) for case, count in rounds.items()}
        return [
            SimpleNamespace(
                block=block,
                cases=[self.case(case, drift[case], self.shift * (arm == "x")) for case in rounds],
            )
            for arm in ("base", "x", "control")
        ]

    def case(self, name, drift, shift):
        noise = self.rng.normal(0, self.sds[name] / math.sqrt(2), len(drift))
        times = tuple(np.exp(shift + drift + noise))
        return CaseRecord(name, None, (Metric("us", "us", "lower", True, times),))

    def run(self, blocks=None, stopped=()):
        for block in range(len(self.plans), blocks or self.cell.design.blocks):
            plan = self.planner.plan(block, stopped, arms=3)
            seconds = self.slowness * plan.seconds
            self.now[0] += seconds
            self.planner.ended(plan, self.records(block, plan.rounds), seconds)
            self.plans.append(plan)
        return [plan.rounds for plan in self.plans]

    @property
    def seconds(self):
        return self.now[0] - self.began


SDS = {"light": 0.04, "heavy": 0.03}


@pytest.mark.parametrize("slowness", [1.0, 1.4, 2.0])
def test_a_study_keeps_its_time_on_a_machine_that_is_slower_than_in_the_pilot(now, slowness):
    study = Study(now, PILOT, 60, {"light": 0.12, "heavy": 0.03}, slowness)
    rounds = study.run()
    assert 48 < study.seconds <= 66
    assert min(one["light"] for one in rounds) >= MIN_ROUNDS_TO_DECIDE


def test_a_case_noisier_than_in_the_pilot_gets_more_rounds_and_a_calmer_one_fewer(now):
    first, *_, last = Study(now, PILOT, 90, {"light": 0.12, "heavy": 0.03}).run()
    assert last["light"] > 2 * first["light"]
    noisy = CellPilot(0.5, (replace(LIGHT, sd=0.2), HEAVY))
    first, *_, last = Study(now, noisy, 90, {"light": 0.04, "heavy": 0.03}).run(12)
    assert last["light"] < first["light"] / 2


@pytest.mark.parametrize(("sd", "reached"), [(0.01, True), (0.1, False)])
def test_single_rounds_of_a_case_out_of_reach_show_its_noise(now, sd, reached):
    """A pilot found cases noisy; those that are calm in the first processes come into reach."""
    heavy = [replace(HEAVY, case=f"heavy {i}", warm_up_s=0.3, sd=0.1) for i in range(3)]
    sds = {"light": 0.04, **{case.case: sd for case in heavy}}
    first, *_, last = Study(now, CellPilot(0.5, (LIGHT, *heavy)), 30, sds, blocks=12).run()
    assert {first[case.case] for case in heavy} == {1}
    assert any(case.case in last for case in heavy) == reached


def test_an_effect_changes_no_plan(now):
    without, with_it = (Study([*now], PILOT, 60, SDS, shift=shift) for shift in (0.0, 0.5))
    plans = []
    for study in (without, with_it):
        now[0] = 100.0
        study.now = now
        plans.append(study.run())
    assert plans[0] == plans[1]


def test_a_case_out_of_reach_gets_an_estimate_and_ends_for_good(now):
    study = Study(now, PILOT, 20, {"light": 0.04, "heavy": 0.3}, blocks=12)
    rounds = study.run()
    measured = [block for block, one in enumerate(rounds) if "heavy" in one]
    assert measured == list(range(len(measured))) and 6 <= len(measured) < 12
    assert study.planner.estimates.keys() == {"heavy"}
    assert study.planner.estimates["heavy"] > 20 and study.seconds <= 22


def test_the_time_of_a_stopped_case_goes_to_the_others(now):
    rounds = []
    for stopped in ((), {"light"}):
        now[0] = 100.0
        pilot = CellPilot(0.5, (replace(LIGHT, sd=0.12), HEAVY))
        study = Study(now, pilot, 75, {"light": 0.12, "heavy": 0.05}, blocks=12)
        study.run(8)
        rounds.append(study.run(stopped=stopped)[-1])
    assert rounds[1].keys() == {"heavy"} and rounds[1]["heavy"] > rounds[0]["heavy"]


def test_a_continued_study_plans_as_the_one_that_was_not_interrupted(now):
    study = Study(now, PILOT, 60, SDS)
    rounds = study.run(5)
    records = Study(now, PILOT, 60, SDS)
    again = Study(now, PILOT, 60, SDS)
    again.planner.add_finished(
        [one for block, of_block in enumerate(rounds) for one in records.records(block, of_block)]
    )
    again.planner.deadline = study.planner.deadline
    assert again.planner.plan(5, (), arms=3).rounds == pytest.approx(
        study.planner.plan(5, (), arms=3).rounds, rel=0.4
    )


def test_a_failed_block_ends_no_case(now):
    study = Study(now, PILOT, 60, SDS)
    study.run(7)
    plan = study.planner.plan(7, (), arms=3)
    study.planner.ended(plan, [SimpleNamespace(block=7, cases=[])], 4.0)
    study.plans.append(plan)
    assert all(one.keys() == {"light", "heavy"} for one in study.run()[7:])


@pytest.mark.parametrize(("start_s", "time_s"), [(6, 120), (2.5, 60)])
def test_every_block_has_a_case_when_the_time_is_over(now, start_s, time_s):
    study = Study(now, CellPilot(start_s, (LIGHT, HEAVY)), time_s, SDS, slowness=2.0)
    assert all(study.run()) and study.plans[-1].rounds.keys() == {"light", "heavy"}
    assert study.planner.estimates == {}  # what has all blocks is tested


def test_a_block_that_is_repeated_has_the_cases_that_it_had(now):
    sds = {"light": 0.04, "heavy": 0.3}
    study = Study(now, PILOT, 20, sds, blocks=12)
    rounds = study.run()
    again, records = (Study(now, PILOT, 20, sds, blocks=12) for _ in range(2))
    again.planner.deadline = now[0]
    again.planner.estimates = dict(study.planner.estimates)
    for block, of_block in enumerate(rounds):
        if block != 2:
            again.planner.add_finished(records.records(block, of_block))
    assert again.planner.plan(2, (), arms=3).rounds.keys() == rounds[2].keys()
    assert again.planner.plan(11, (), arms=3).rounds.keys() == rounds[11].keys() == {"light"}
    assert again.planner.estimates.keys() == {"heavy"}


def test_the_time_of_dropped_arms_goes_to_the_rest(now):
    rounds = []
    for arms in (3, 1):
        now[0] = 100.0
        study = Study(now, PILOT, 40, {"light": 0.12, "heavy": 0.3}, blocks=12)
        study.run(8)
        rounds.append(study.planner.plan(8, (), arms=arms).rounds["light"])
    assert rounds[1] > 2 * rounds[0]
    assert all(count % 2 == 0 for count in study.planner.plan(8, (), arms=2).rounds.values())
