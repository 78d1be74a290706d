"""Coverage of the winner's interval and of the set of arms that may be the best, simulated.

    python benchmarks/best_arm_coverage.py 2000

The program simulates studies of 2, 4 and 12 arms, with several true differences between the arms
and several kinds of noise (a stall or a slow process makes a run worse). *Interval*: the share of
studies in which the winner's interval contains its true difference from the reference arm (arm 0).
*Usual*: the same share for Student's interval, which ignores that the winner was chosen. *Set*: the
share of studies in which the set contains the best arm. *Size*: the mean number of arms in the set.
The true differences, in standard errors of the difference of two arms:

- *equal*: all arms are equal; the best is arm 0 by convention;
- *close*: one arm is better by 1.5;
- *clear*: one arm is better by 8;
- *two*: two arms are better by 4 and equal to each other;
- *ladder*: every arm is better by 1 than the one before it;
- *reference*: arm 0 is better by 2, so the reference usually wins.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from labkit.analysis.statistics import best_arm

Floats = NDArray[np.float64]
DESIGNS = {"10 x 1": (10, 1), "8 x 1": (8, 1), "5 x 2": (5, 2)}
ARMS = (2, 4, 12)
TRUTHS = ("equal", "close", "clear", "two", "ladder", "reference")
NOISES = ("clean", "drift", "slow processes", "heavy tails", "unequal")
SD = 0.01
SLOW_SHARE, SLOW = 0.25, 0.05
TAIL_SHARE, TAIL = 0.05, 0.08
NOISIER = 2.0  # the noise of the last arm, relative to the others, if it is unequal


@dataclass(frozen=True)
class Rates:
    """The figures of a table row (see the module): three shares of studies, and a mean size."""

    interval: float
    usual: float
    set: float
    size: float


def true_means(truth: str, arms: int, error: float) -> Floats:
    """Return the arms' true means, float64 [arms].

    ``truth`` is one of the names that the module lists. ``error`` is the standard error of the
    difference of two arms.
    """
    means = np.zeros(arms)
    if truth == "close":
        means[-1] = 1.5
    elif truth == "clear":
        means[-1] = 8.0
    elif truth == "two":
        means[-2:] = 4.0
    elif truth == "ladder":
        means = np.arange(arms, dtype=np.float64)
    elif truth == "reference":
        means[0] = 2.0
    return means * error


def noise_sd(noise: str) -> float:
    """Return the standard deviation of a run's noise."""
    if noise == "slow processes":
        return math.hypot(SD, SLOW * math.sqrt(SLOW_SHARE * (1 - SLOW_SHARE)))
    if noise == "heavy tails":
        return math.hypot(SD, TAIL * math.sqrt(2 * TAIL_SHARE - TAIL_SHARE**2))
    return SD


def draw_noise(rng: np.random.Generator, noise: str, blocks: int, runs: int, arms: int) -> Floats:
    """Return the noise of runs in permuted blocks, float64 [blocks, runs, arms]."""
    size = blocks * runs * arms
    values = rng.normal(0.0, SD, size)
    if noise == "drift":
        values += np.linspace(0.0, 0.05, size)
    elif noise == "slow processes":
        values -= SLOW * (rng.random(size) < SLOW_SHARE)
    elif noise == "heavy tails":
        values -= (rng.random(size) < TAIL_SHARE) * rng.exponential(TAIL, size)
    shuffled = rng.permuted(values.reshape(blocks, runs * arms), axis=1)
    shuffled = shuffled.reshape(blocks, runs, arms)
    if noise == "unequal":
        shuffled[..., -1] *= NOISIER
    return shuffled


def rates(
    truth: str, noise: str, design: tuple[int, int], arms: int, studies: int, alpha: float = 0.05
) -> Rates:
    """Simulate ``studies`` studies and return the figures of their table row.

    ``design`` is (number of blocks, runs of each arm per block).
    """
    blocks, runs = design
    rng = np.random.default_rng([blocks, runs, arms, TRUTHS.index(truth), NOISES.index(noise)])
    means = true_means(truth, arms, noise_sd(noise) * math.sqrt(2.0 / (blocks * runs)))
    best, counts = int(np.argmax(means)), np.zeros(4)
    for _ in range(studies):
        values = means + draw_noise(rng, noise, blocks, runs, arms)
        winner = best_arm.winner(values, 0, alpha)
        true = means[winner.arm] - means[winner.reference]
        possible = best_arm.possibly_best(values, alpha)
        counts += (
            winner.interval[0] <= true <= winner.interval[1],
            abs(usual_difference(values, winner) - true) <= usual_reach(values, winner, alpha),
            best in possible,
            len(possible),
        )
    return Rates(*(counts / studies))


def usual_difference(values: Floats, winner: best_arm.Winner) -> float:
    """Return the observed difference of the winner from its reference."""
    means = values.mean(axis=(0, 1))
    return float(means[winner.arm] - means[winner.reference])


def usual_reach(values: Floats, winner: best_arm.Winner, alpha: float) -> float:
    """Return half the width of Student's interval, which ignores that the winner was chosen."""
    arms = best_arm.BlockedValues(values)
    error = arms.standard_error(winner.arm, winner.reference)
    return -float(stdtrit(arms.degrees_of_freedom, alpha / 2)) * error


def table(studies: int) -> Iterator[str]:
    """Yield the lines of a Markdown table of all designs, numbers of arms, noises and truths."""
    yield "| design | arms | noise | truth | interval | usual | set | size |"
    yield "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: |"
    for name, design in DESIGNS.items():
        for arms in ARMS:
            for noise in NOISES:
                for truth in TRUTHS:
                    r = rates(truth, noise, design, arms, studies)
                    shares = " | ".join(f"{100 * x:.1f} %" for x in (r.interval, r.usual, r.set))
                    yield f"| {name} | {arms} | {noise} | {truth} | {shares} | {r.size:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("studies", type=int, nargs="?", default=2000)
    parser.add_argument("--permutations", type=int, default=400, help="per set (labkit: 4,000)")
    options = parser.parse_args()
    best_arm.N_PERMUTATIONS = options.permutations
    for line in table(options.studies):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
