"""Error rates of the verdicts of kernel studies on noisier machines than ours, simulated.

    python benchmarks/verdict_error_rate.py 400

Studies of 10 processes, without any difference between the arms, go through the estimates over
rounds, tests, families and verdicts of a report. The noises:

- *skewed*: the rounds of interleaved arms vary by so much, with a tail to the right (gamma, shape
  1.5), and a round of all arms by as much;
- *two speeds*: the machine is 15 % slower in half of the time, for about 20 turns at a time;
- *processes*: every run is a process of its own, and processes differ by so much (lognormal).

Of the largest studies there are a quarter as many. *False word*: any better, worse or trivial in a
study. *False equivalent*: any equivalent or trivial if every arm differed by the margin (the
intervals move with the effect). *Coverage*: all simultaneous intervals of the study contain the
truth. *Alone*: the mean coverage of the intervals of single rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.comparison.verdict import judge
from labkit.analysis.model.result_row import Comparison

Floats = NDArray[np.float64]
PROCESSES, ROUNDS = 10, 16
MARGIN_PCT = 2.0
CRITERIA = DecisionCriteria(1, 0.05, MARGIN_PCT)
SIZES = ((1, 1), (12, 1), (1, 16), (12, 4), (12, 16))  # rows and arms
LARGEST_SHARE = 4  # of the largest studies there are a quarter as many
SKEWED = {"skewed, 3 %": 0.03, "skewed, 8 %": 0.08, "skewed, 15 %": 0.15}
BETWEEN = {"processes, 20 %": 0.2, "processes, 50 %": 0.5, "processes, 96 %": 0.96}
NOISES = (*SKEWED, "two speeds, 15 %", *BETWEEN)


def draw(rng: np.random.Generator, noise: str, rows: int, arms: int) -> Floats:
    """Return log values, float64 [rows, processes, arms, rounds]; a process has one round."""
    if noise in BETWEEN:
        return rng.normal(0.0, math.log1p(BETWEEN[noise]), (rows, PROCESSES, arms, 1))
    shape = (rows, PROCESSES, arms, ROUNDS)
    if noise in SKEWED:
        turns, rounds = (rng.gamma(1.5, 1.0, s) for s in (shape, (rows, PROCESSES, 1, ROUNDS)))
        return SKEWED[noise] / math.sqrt(1.5) * (turns + rounds - 3.0)
    changes = rng.random((rows, PROCESSES, arms * ROUNDS)) < 1 / 20
    changes[:, :, 0] = rng.random((rows, PROCESSES)) < 0.5
    slow = (changes.cumsum(axis=2) % 2).reshape(rows, PROCESSES, ROUNDS, arms)
    slow = rng.permuted(slow, axis=3).transpose(0, 1, 3, 2)  # the order within a round
    return 0.15 * slow + rng.normal(0.0, 0.02, shape)


def as_rows(logs: Floats, names: Sequence[str]) -> list[MetricRow]:
    """Return the rows of a study from log values; see :func:`draw`."""
    times, paired = np.exp(logs), "base" if logs.shape[3] > 1 else None
    middles = np.exp(np.median(logs, axis=3))
    rows = []
    for i, of_row in enumerate(times):
        arms = {
            name: [
                RunValue(block, a, "", float(middles[i, block, a]), tuple(of_row[block, a]))
                for block in range(PROCESSES)
            ]
            for a, name in enumerate(names)
        }
        rows.append(
            MetricRow(
                f"case {i}", "us", "us", "lower", True, None, paired, arms, None, "middle_half"
            )
        )
    return rows


def study(rng: np.random.Generator, noise: str, num_rows: int, num_arms: int) -> Floats:
    """Return the module's four figures of one study: three times 0 or 1, and a share."""
    names = ["base", "control", *(f"arm {i}" for i in range(num_arms))]
    rows = as_rows(draw(rng, noise, num_rows, len(names)), names)
    control = compare_arm(rows, "control", "base", CRITERIA)
    found: Mapping[str, list[Comparison]] = {
        arm: compare_arm(rows, arm, "base", CRITERIA, num_arms) for arm in names[2:]
    }
    words = {
        judge(one, "lower", CRITERIA, [], control[i]).word
        for comparisons in found.values()
        for i, one in enumerate(comparisons)
    }
    every = [one for comparisons in found.values() for one in comparisons]
    intervals = np.log1p(np.array([one.ci_pct or (-99.9, np.inf) for one in every]) / 100)
    alone = np.array([one.ci_raw_pct or (-99.9, np.inf) for one in every])
    low, high = np.log1p(np.array([-1.0, 1.0]) * MARGIN_PCT / 100)
    moved = intervals + high
    return np.array(
        [
            bool(words & {"better", "worse", "trivial"}),
            np.any((moved[:, 0] > low) & (moved[:, 1] < high)),
            np.all((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0)),
            np.mean((alone[:, 0] <= 0) & (alone[:, 1] >= 0)),
        ],
        np.float64,
    )


def table(noises: Sequence[str], studies: int) -> Iterator[str]:
    """Yield the lines of a Markdown table of noises, numbers of rows and of arms."""
    yield "| noise | rows | arms | false word | false equivalent | coverage | alone |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for noise in noises:
        for rows, arms in SIZES:
            rng = np.random.default_rng([NOISES.index(noise), rows, arms])
            count = -(-studies // LARGEST_SHARE) if (rows, arms) == SIZES[-1] else studies
            shares = np.mean([study(rng, noise, rows, arms) for _ in range(count)], axis=0)
            texts = " | ".join(f"{100 * share:.1f} %" for share in shares)
            yield f"| {noise} | {rows} | {arms} | {texts} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("studies", type=int, nargs="?", default=400)
    parser.add_argument("--noise", choices=NOISES, help="default: all")
    options = parser.parse_args()
    for line in table([options.noise] if options.noise else NOISES, options.studies):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
