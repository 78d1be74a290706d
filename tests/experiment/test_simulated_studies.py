"""Simulated A/A studies through the real schedule: the error rate is as promised.

The machine drifts, some processes are slow as a whole, and some runs have heavy tails; the
arms differ in nothing. The order that the schedule draws is what makes the test's p valid:
a fixed ABAB order fails the same check.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from planted_runs import PlantedRuns, kernel_fields

from labkit import analysis
from labkit.analysis.statistics.permutation_test import permutation_test
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.config import PlannedLook
from labkit.experiment.permuted_blocks import Run, schedule
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.records import read_runs

STUDIES = 2000


class Machine:
    """One study's machine: log time of the run at a place, whatever the arm."""

    def __init__(
        self,
        seed: int,
        runs: int,
        *,
        drift: float = 0.05,
        modes: float = 0.25,
        tails: float = 0.05,
        noise: float = 0.005,
    ) -> None:
        rng = np.random.default_rng(seed)
        line = np.linspace(0.0, drift, runs)
        slow = np.where(rng.random(runs) < modes, 0.05, 0.0)
        spikes = np.where(rng.random(runs) < tails, rng.exponential(0.08, runs), 0.0)
        self.log_times = line + slow + spikes + rng.normal(0.0, noise, runs)


@dataclass(frozen=True)
class Study:
    """Arms, blocks, runs per block, and who orders the runs."""

    arms: tuple[str, ...] = ("a", "b", "control")
    blocks: int = 4
    runs: int = 2
    permuted: bool = True

    def order(self, seed: int) -> list[Run]:
        if self.permuted:
            return schedule(self.arms, self.blocks, self.runs, seed)
        block = self.arms * self.runs
        return [Run(b, p, arm) for b in range(self.blocks) for p, arm in enumerate(block)]

    def p_value(self, seed: int, effect: float = 0.0, **machine: float) -> float:
        order = self.order(seed)
        times = Machine(seed, len(order), **machine).log_times
        values: dict[str, list[float]] = {arm: [] for arm in self.arms}
        for run, log_time in zip(order, times, strict=True):
            values[run.arm].append(log_time + (effect if run.arm == "b" else 0.0))
        a, b = (np.array(values[arm]).reshape(self.blocks, self.runs) for arm in ("a", "b"))
        return permutation_test(a, b)

    def rejections(self, **machine: float) -> float:
        return float(np.mean([self.p_value(s, **machine) <= 0.05 for s in range(STUDIES)]))


DRIFT_ONLY = {"modes": 0.0, "tails": 0.0}
PAIRS = Study(arms=("a", "b"), blocks=10, runs=1)


@pytest.mark.parametrize("study", [Study(), Study(arms=("a", "b")), Study(blocks=6, runs=1), PAIRS])
@pytest.mark.parametrize("machine", [{}, DRIFT_ONLY, {"drift": 0.0, "tails": 0.3}])
def test_two_thousand_studies_of_nothing_seldom_find_something(study, machine):
    assert study.rejections(**machine) <= 0.06


def test_a_fixed_order_fails_the_same_check():
    assert PAIRS.rejections(**DRIFT_ONLY) <= 0.06
    assert replace(PAIRS, permuted=False).rejections(**DRIFT_ONLY) > 0.06


def test_a_planted_effect_is_found():
    quiet = {"drift": 0.0, "modes": 0.0, "tails": 0.0, "noise": 0.01}
    rejections = [Study().p_value(s, effect=math.log(1.05), **quiet) <= 0.05 for s in range(500)]
    assert np.mean(rejections) >= 0.8


class Simulated(PlantedRuns):
    """A run is a place on the simulated machine."""

    def __init__(self, seed: int, total: int, effect: float) -> None:
        super().__init__()
        self.machine, self.effect = Machine(seed, total, modes=0.0, tails=0.0), effect
        self.random = random.Random(seed)

    def fields(self, run, cell):
        log = self.machine.log_times[len(self.launched) - 1]
        log += self.effect if run.arm == "seq_map" else 0.0
        return kernel_fields(*(100 * math.exp(log + self.random.gauss(0, 0.002)) for _ in range(5)))


LOOKS = [PlannedLook(8, 0.01), PlannedLook(9, 0.01), PlannedLook(10, 0.01), PlannedLook(12, 0.02)]


def sequential_rejections(looks: list[PlannedLook], studies: int = 1000) -> float:
    """Share of A/A studies (pairs, drift, slow processes) that claim something at a look."""
    pairs = Study(arms=("a", "b"), blocks=looks[-1].blocks, runs=1)
    rejections = 0
    for seed in range(studies):
        order = pairs.order(seed)
        logs = Machine(seed, len(order)).log_times
        signs = np.array([1.0 if run.arm == "b" else -1.0 for run in order]) * logs
        differences = signs.reshape(-1, 2).sum(axis=1)[:, None]
        rejections += any(
            permutation_test(np.zeros((look.blocks, 1)), differences[: look.blocks]) <= look.alpha
            for look in looks
        )
    return rejections / studies


def test_looks_that_share_alpha_seldom_find_something():
    assert sequential_rejections(LOOKS) <= 0.06


def test_looks_that_each_spend_all_of_alpha_fail_the_same_check():
    assert sequential_rejections([PlannedLook(look.blocks, 0.05) for look in LOOKS]) > 0.06


@pytest.mark.slow
def test_sequential_studies_of_nothing_through_the_runner(make_cell):
    """Of 150 A/A studies at most 14 claim something: more has odds of 1 in 100 at 5 %."""
    claims, blocks = 0, []
    for seed in range(150):
        cell = make_cell(
            blocks=12, looks=LOOKS, seed=seed, control=False, folder=f"aa-{seed}", margin_pct=0.1
        )
        launcher = Simulated(seed, len(cell.schedule()), 0.0)
        run_cell(cell, launcher, analysis=AnalysisCache())
        (row,) = analysis.analyse_cell(cell.dir)["rows"]
        words = {comparison["verdict"] for comparison in row["comparisons"]}
        claims += bool(words & {"better", "worse", "trivial"})
        blocks.append(row["comparisons"][0]["blocks"])
    assert claims <= 14
    assert (min(blocks), max(blocks)) == (8, 12)


@pytest.mark.parametrize(
    ("effect", "words"), [(0.0, {"inconclusive", "equivalent"}), (0.1, {"worse"})]
)
def test_a_simulated_study_passes_through_runner_and_analysis(make_cell, effect, words):
    cell = make_cell(blocks=5, runs_per_block=2)
    run_cell(cell, Simulated(3, len(cell.schedule()), effect))
    assert [r.run for r in read_runs(cell.dir)] == [run.name for run in cell.schedule()]
    result = analysis.analyse_cell(cell.dir)
    (row,) = result["rows"]
    (comparison,) = [c for c in row["comparisons"] if c["arm"] == "seq_map"]
    assert comparison["verdict"] in words
    assert result["gates"]["healthy"]["status"] == "pass"
