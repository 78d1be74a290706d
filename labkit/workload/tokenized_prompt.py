"""A tokenised prompt, one request of a workload; the number, seed and lengths of prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

import numpy as np

from labkit.config import Experiment, LengthKind, Lengths, require

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload: its prompt's token ids and its maximum number of output tokens.

    ``session``: requests of the same session are sent one after another, each after the answer to
    the previous request; None: no session. ``timestamp_ms``: recorded arrival time in a trace.
    ``messages``: the conversation that was tokenised, for a server that applies its own chat
    template.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    session: str | None = None
    timestamp_ms: float | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if not self.token_ids or self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id} must have at least one prompt token and one output "
                "token"
            )


def take_first(experiment: Experiment, items: Sequence[T], what: str = "requests") -> Sequence[T]:
    """Return the first ``workload.num_requests`` of the items, or all if it is null or 0.

    Raises ``ConfigError`` if there are fewer items.
    """
    count, name = experiment.workload.num_requests or None, experiment.workload.name
    require(
        count is None or count <= len(items),
        f"workload.num_requests={count}: {name} has only {len(items)} {what}",
    )
    return items[:count]


def prompts_seed(experiment: Experiment) -> int:
    """Return the seed of a workload's prompts: its own or, if it has none, the cell's."""
    own = experiment.workload.prompts.seed
    return experiment.seed if own is None else own


def draw_lengths(lengths: Lengths, rng: np.random.Generator, count: int) -> list[int]:
    """Draw ``count`` lengths in tokens. Fixed and listed lengths do not use ``rng``."""
    if lengths.kind is LengthKind.fixed:
        return [lengths.tokens] * count
    if lengths.kind is LengthKind.listed:
        return list(islice(cycle(lengths.values), count))
    low, high = lengths.bounds
    if lengths.kind is LengthKind.uniform:
        return [int(n) for n in rng.integers(low, high, count, endpoint=True)]
    assert lengths.median is not None and lengths.sigma is not None
    drawn = rng.lognormal(math.log(lengths.median), lengths.sigma, count)
    # Clipped as floats: a wide distribution may exceed an integer's range.
    return [int(n) for n in np.clip(drawn, low, high).astype(int)]
