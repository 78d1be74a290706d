"""Coverage of the capacity's interval, simulated: a queue with one server and Poisson arrivals.

    python benchmarks/capacity_coverage.py 2000

A request is within the limits if its time in the system is at most five mean service times. The
requests of a run share a queue, which is empty at the start. The mean service time varies between
runs with a standard deviation of 3 %. The true share of requests within the limits at a rate is
estimated from 20,000 runs. *Covers*: the share of studies whose interval contains the true
capacity. *At least* and *below*: the shares of studies whose interval has a lower and an upper
limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.statistics.load_capacity import LoadCounts, load_capacity

Floats = NDArray[np.float64]
LIMIT = 5.0  # mean service times
RUN_SD = 0.03
TRUE_RUNS = 20_000
GRIDS = {"coarse": (0.2, 0.4, 0.6, 0.8, 1.0), "fine": tuple(np.linspace(0.3, 0.9, 13))}
TARGETS = (0.9, 0.95, 0.99)
RUNS, REQUESTS = (6, 10, 20), (16, 64)


def good_requests(rng: np.random.Generator, rate: float, runs: int, requests: int) -> Floats:
    """Return the number of requests within the limit in each run, float64 [runs]."""
    gaps = rng.exponential(1.0, (runs, requests)) / rate
    services = rng.gamma(4.0, 0.25, (runs, requests))
    services *= np.exp(rng.normal(0.0, RUN_SD, (runs, 1)))
    wait, good = np.zeros(runs), np.zeros(runs)
    for i in range(requests):
        if i:
            wait = np.maximum(0.0, wait + services[:, i - 1] - gaps[:, i])
        good += wait + services[:, i] <= LIMIT
    return good


@cache
def true_share(rate: float, requests: int) -> float:
    """Return the true share of requests within the limit at a rate."""
    rng = np.random.default_rng([requests, round(1e6 * rate)])
    return float(good_requests(rng, rate, TRUE_RUNS, requests).sum()) / TRUE_RUNS / requests


def rates_of_claims(
    grid: tuple[float, ...], target: float, runs: int, requests: int, studies: int
) -> tuple[float, float, float]:
    """Return the table's shares of studies: *covers*, *at least* and *below* (see the module)."""
    keeps = [rate for rate in grid if true_share(rate, requests) >= target]
    fails = [rate for rate in grid if rate not in keeps]
    covers = lower = upper = 0
    rng = np.random.default_rng([len(grid), runs, requests, round(100 * target)])
    total = np.full(runs, float(requests))
    for _ in range(studies):
        loads = [LoadCounts(rate, good_requests(rng, rate, runs, requests), total) for rate in grid]
        found = load_capacity(loads, target, 0.05)
        lower, upper = lower + (found.at_least is not None), upper + (found.below is not None)
        covers += (found.at_least is None or found.at_least in keeps) and (
            found.below is None or found.below in fails
        )
    return covers / studies, lower / studies, upper / studies


def table(studies: int) -> Iterator[str]:
    """Yield the lines of a Markdown table of all grids, targets, numbers of runs and requests."""
    yield "| rates | target | runs | requests | covers | at least | below |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, grid in GRIDS.items():
        for target in TARGETS:
            for runs in RUNS:
                for requests in REQUESTS:
                    shares = rates_of_claims(grid, target, runs, requests, studies)
                    texts = " | ".join(f"{100 * share:.1f} %" for share in shares)
                    yield f"| {name} | {target:.0%} | {runs} | {requests} | {texts} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("studies", type=int, nargs="?", default=2000)
    options = parser.parse_args()
    for line in table(options.studies):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
