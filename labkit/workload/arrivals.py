"""When requests arrive: seconds from the beginning, by the law that a workload names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.config import ArrivalKind, Arrivals, require
from labkit.workload.tokenized_prompts import Prompt

STREAM = 7  # of the seed; prompts and warm-up have others


def gaps(arrivals: Arrivals, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Draw the gaps between arrivals at a rate: seconds, float64 [count].

    They are as drawn, not rescaled so that a short run meets the rate exactly: then they would
    no longer follow the law. What rate they make is recorded.
    """
    mean = 1 / (arrivals.rate or 1.0)
    if arrivals.kind is ArrivalKind.poisson:
        return rng.exponential(mean, count)
    if arrivals.kind is ArrivalKind.gamma:
        return rng.gamma(arrivals.shape, mean / arrivals.shape, count)
    return np.full(count, mean)


def due(arrivals: Arrivals, prompts: Sequence[Prompt], seed: int) -> list[float] | None:
    """Return when each request is due at the earliest (seconds); None in a closed loop.

    At a rate it is sessions that arrive: their later turns are due with the answer before
    them. A smaller number of requests is the beginning of a larger.
    """
    if arrivals.kind is ArrivalKind.closed:
        return None
    if arrivals.kind is ArrivalKind.at_once:
        return [0.0] * len(prompts)
    if arrivals.kind is ArrivalKind.trace:
        return [_stamp(prompt) / 1e3 * arrivals.time_scale for prompt in prompts]
    begun: set[str] = set()
    firsts = [_begins(prompt, begun) for prompt in prompts]
    drawn = gaps(arrivals, np.random.default_rng([seed, STREAM]), sum(firsts))
    times = iter(np.concatenate([[0.0], np.cumsum(drawn[:-1])]).tolist())
    return [next(times) if first else 0.0 for first in firsts]


def _begins(prompt: Prompt, begun: set[str]) -> bool:
    """Tell whether a request is the first of its session, or of none; note the session."""
    if prompt.session is None:
        return True
    new = prompt.session not in begun
    begun.add(prompt.session)
    return new


def _stamp(prompt: Prompt) -> float:
    require(
        prompt.timestamp_ms is not None,
        f"workload.arrivals.kind=trace: request {prompt.request_id} has no timestamp",
    )
    return float(prompt.timestamp_ms or 0.0)
