"""Arrival times of requests, in seconds from the start: drawn from a distribution, or recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.config import ArrivalKind, Arrivals, ConfigError, Experiment, require
from labkit.workload import sources
from labkit.workload.sources import PromptSource, TimestampedSource, bounded_reader, source_of
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
        for prompt in prompts:
            require(
                prompt.timestamp_ms is not None,
                f"workload.arrivals.kind=trace: request {prompt.request_id} has no timestamp",
            )
        return [(prompt.timestamp_ms or 0.0) / 1e3 * arrivals.time_scale for prompt in prompts]
    arrives = _start_sessions(prompts)
    drawn = gaps(arrivals, np.random.default_rng([seed, STREAM]), sum(arrives))
    times = iter(np.concatenate([[0.0], np.cumsum(drawn[:-1])]).tolist())
    return [next(times) if arriving else 0.0 for arriving in arrives]


def rate_unit(prompts: Sequence[Prompt]) -> str:
    """Return what arrives at the rate: ``sessions/s`` if a session has several requests."""
    return "requests/s" if all(_start_sessions(prompts)) else "sessions/s"


def _start_sessions(prompts: Sequence[Prompt]) -> list[bool]:
    """Return of each request whether it begins or has no session."""
    first: dict[str, int] = {}
    return [p.session is None or first.setdefault(p.session, i) == i for i, p in enumerate(prompts)]


def check_timestamps(source: PromptSource, experiment: Experiment) -> None:
    """Check that every request has a timestamp, which ``workload.arrivals.kind=trace`` needs."""
    needed = "which workload.arrivals.kind=trace needs"
    if not isinstance(source, TimestampedSource):
        raise ConfigError(
            f"workload.kind={experiment.workload.kind}: its prompt source has no method "
            f"timestamps_ms(), {needed}"
        )
    times = sources.timestamps_ms(source, experiment)
    missing = next((index for index, ms in enumerate(times) if ms is None), None)
    if missing is not None:
        place = _timestamp_place(source, experiment, missing)
        raise ConfigError(f"{place}: timestamp is missing, {needed}")


def _timestamp_place(source: PromptSource, experiment: Experiment, index: int) -> str:
    """Return the place of a request's timestamp in the user's file, list or class."""
    workload, prompts = experiment.workload, experiment.workload.prompts
    named = prompts.source if source is source_of(experiment) else None
    if named == "file":
        return f"{prompts.path}, line {bounded_reader.line_number(prompts.path or '', index)}"
    if named == "listed":
        return f"workload.prompts.listed[{index}]"
    return f"workload.kind={workload.kind}, timestamps_ms()[{index}]"
