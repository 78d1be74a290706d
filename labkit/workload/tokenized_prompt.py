"""A tokenised prompt, which is one request of a workload, and the cache of prompts.

The cache passes the prompts from the parent to the workers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np

from labkit.config import Experiment, LengthKind, Lengths, require
from labkit.machine import cache_entries

T = TypeVar("T")
FORMAT = 7  # version of the cached file's format and of its generation; part of the cache key


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


def prompt_key(identity: Mapping[str, Any]) -> str:
    """Return the cache key of a set of prompts; ``identity``: all that determines the prompts."""
    text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cached_prompts(key: str, make: Callable[[], tuple[Prompt, ...]]) -> tuple[Prompt, ...]:
    """Return the prompts stored under ``key`` in the cache, or make and store them.

    Raises ``CacheError`` if the cache folder cannot be written.
    """
    path = cache_entries.root() / "workloads" / f"{key}.json"
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):  # foreign or damaged: it is only a cache
        path.unlink(missing_ok=True)
    prompts = make()
    cache_entries.write_file(path, _encode(prompts))
    return prompts


def _encode(prompts: tuple[Prompt, ...]) -> bytes:
    requests = [{f.name: getattr(one, f.name) for f in fields(Prompt)} for one in prompts]
    return json.dumps({"requests": requests}, separators=(",", ":")).encode()


def _decode(data: bytes) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(
            **{
                **item,
                "token_ids": tuple(item["token_ids"]),
                "messages": None if item["messages"] is None else tuple(item["messages"]),
            }
        )
        for item in json.loads(data)["requests"]
    )


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
