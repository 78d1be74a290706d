"""Arrival times of requests, in seconds from the start, drawn from the workload's distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.config import ArrivalKind, Arrivals, require
from labkit.workload.tokenized_prompt import Prompt

STREAM = 7  # number of the seed's random stream; prompts and warm-up use other streams


def gaps(arrivals: Arrivals, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Draw ``count`` gaps between arrivals, in seconds: float64 [count].

    The gaps are not rescaled to meet the rate exactly in a short run, because then they would no
    longer follow the distribution. The record holds the actual rate of the drawn gaps.
    """
    mean = 1 / (arrivals.rate or 1.0)
    if arrivals.kind is ArrivalKind.poisson:
        return rng.exponential(mean, count)
    if arrivals.kind is ArrivalKind.gamma:
        return rng.gamma(arrivals.shape, mean / arrivals.shape, count)
    return np.full(count, mean)


def due(arrivals: Arrivals, prompts: Sequence[Prompt], seed: int) -> list[float] | None:
    """Return the earliest time (seconds) to send each request, or None in a closed loop.

    With a rate, the drawn times are the arrivals of sessions. A later request of a session has
    time 0, because it waits only for the answer to the request before. With the same seed, a
    shorter run has the first arrival times of a longer run.
    """
    if arrivals.kind is ArrivalKind.closed:
        return None
    if arrivals.kind is ArrivalKind.at_once:
        return [0.0] * len(prompts)
    if arrivals.kind is ArrivalKind.trace:
        return [_timestamp(prompt) / 1e3 * arrivals.time_scale for prompt in prompts]
    sessions: set[str] = set()
    arrives = [_starts_session(prompt, sessions) for prompt in prompts]
    drawn = gaps(arrivals, np.random.default_rng([seed, STREAM]), sum(arrives))
    times = iter(np.concatenate([[0.0], np.cumsum(drawn[:-1])]).tolist())
    return [next(times) if arriving else 0.0 for arriving in arrives]


def rate_unit(prompts: Sequence[Prompt]) -> str:
    """Return what arrives at the rate: ``sessions/s`` if a session has several requests."""
    sessions: set[str] = set()
    alone = all(_starts_session(prompt, sessions) for prompt in prompts)
    return "requests/s" if alone else "sessions/s"


def _starts_session(prompt: Prompt, sessions: set[str]) -> bool:
    """Return whether a request has no session or is the first of its session.

    The request's session is added to ``sessions``.
    """
    if prompt.session is None:
        return True
    new = prompt.session not in sessions
    sessions.add(prompt.session)
    return new


def _timestamp(prompt: Prompt) -> float:
    require(
        prompt.timestamp_ms is not None,
        f"workload.arrivals.kind=trace: request {prompt.request_id} has no timestamp",
    )
    return float(prompt.timestamp_ms or 0.0)
