"""Error rate of design=search: how often the best setting of a sweep is lost, simulated.

    python benchmarks/search_error_rate.py 1000

Studies of 6 and 16 settings are analysed after 8, 12, 16 and 24 blocks, the looks of
``conf/design/search.yaml``. With 2 runs of each setting per block, the looks are after half as many
blocks. The true differences between settings and the kinds of noise are those of
``best_arm_coverage.py``. *Wrong*: the share of studies that drop the best setting, or whose final
set lacks it. *One left*: the share that end with one setting. *Runs*: the mean number of runs,
relative to running all settings in all blocks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from best_arm_coverage import NOISES, TRUTHS, draw_noise, noise_sd, true_means

from labkit.analysis.statistics import best_arm

LOOKS = (8, 12, 16, 24)  # blocks
ALPHA = 0.0125  # of each look
# The looks and the number of runs per block of each design.
DESIGNS = {"one run": (LOOKS, 1), "two runs": (tuple(look // 2 for look in LOOKS), 2)}
ARMS = (6, 16)


@dataclass(frozen=True)
class SearchRates:
    """The figures of a table row, as shares; the module docstring defines them."""

    wrong: float
    one_left: float
    runs: float


def search_rates(design: str, truth: str, noise: str, arms: int, studies: int) -> SearchRates:
    """Simulate ``studies`` searches. Arm 0 is the baseline, which is never dropped."""
    looks, runs = DESIGNS[design]
    seeds = list(DESIGNS).index(design), TRUTHS.index(truth), NOISES.index(noise)
    rng = np.random.default_rng([arms, *seeds])
    means = true_means(truth, arms, noise_sd(noise) * math.sqrt(2.0 / (looks[-1] * runs)))
    best, counts = int(np.argmax(means)), np.zeros(3)
    for _ in range(studies):
        values = means + draw_noise(rng, noise, looks[-1], runs, arms)
        kept, possible, used, before = list(range(arms)), list(range(arms)), 0, 0
        for look in looks:
            used, before = used + (look - before) * len(kept), look
            chosen = best_arm.possibly_best(values[:look, :, kept], ALPHA)
            possible = [kept[i] for i in chosen]
            kept = sorted({0, *possible})
            if len(possible) == 1:
                break
        counts += best not in possible, len(possible) == 1, used / (looks[-1] * arms)
    return SearchRates(*(counts / studies))


def table(studies: int) -> Iterator[str]:
    """Yield the lines of a Markdown table of all designs, noises and truths."""
    yield "| design | settings | noise | truth | wrong | one left | runs |"
    yield "| --- | ---: | --- | --- | ---: | ---: | ---: |"
    for design in DESIGNS:
        for arms in ARMS:
            for noise in NOISES:
                for truth in TRUTHS:
                    r = search_rates(design, truth, noise, arms, studies)
                    shares = " | ".join(f"{100 * x:.1f} %" for x in (r.wrong, r.one_left, r.runs))
                    yield f"| {design} | {arms} | {noise} | {truth} | {shares} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("studies", type=int, nargs="?", default=1000)
    parser.add_argument("--permutations", type=int, default=400, help="per look (labkit: 4,000)")
    options = parser.parse_args()
    best_arm.N_PERMUTATIONS = options.permutations
    for line in table(options.studies):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
