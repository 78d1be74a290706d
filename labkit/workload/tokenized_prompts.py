"""Tokenised requests, and the cache that hands them from the parent to the workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from labkit.config import Experiment, require
from labkit.machine import cache_dir

T = TypeVar("T")
FORMAT = 4  # of the cached file, and how it is made; part of its name


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the workload states it: token ids in, at most so many out.

    ``session``: whose requests wait for the answer to the one before; None: it waits for none.
    ``timestamp_ms``: when it was recorded to arrive, where it was. ``messages``: the conversation
    that the ids were written from, for a server that writes it itself.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    session: str | None = None
    timestamp_ms: float | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    def __post_init__(self) -> None:
        """Check that there is something to compute."""
        if not self.token_ids or self.max_tokens < 1:
            raise ValueError(f"request {self.request_id}: no prompt token or no output token")


def first(experiment: Experiment, items: Sequence[T], what: str = "requests") -> Sequence[T]:
    """Return what a workload is asked for of all that it has: everything, or the first few.

    Raises
    ------
    ConfigError
        It has fewer than ``workload.num_requests``.
    """
    asked, name = experiment.workload.num_requests, experiment.workload.name
    require(
        asked is None or asked <= len(items),
        f"workload.num_requests={asked}: {name} has {len(items)} {what}",
    )
    return items[:asked]


def prompt_key(identity: Mapping[str, Any]) -> str:
    """Name a set of prompts by everything that decides it (JSON types)."""
    text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def stored(key: str, make: Callable[[], tuple[Prompt, ...]]) -> tuple[Prompt, ...]:
    """Read the prompts named ``key`` from the cache; make and store them if they are not there.

    Raises
    ------
    CacheError
        The cache folder cannot be written.
    """
    path = cache_dir.root() / "workloads" / f"{key}.json"
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):  # not ours, or damaged: it is only a cache
        path.unlink(missing_ok=True)
    prompts = make()
    cache_dir.atomic_write(path, _encode(prompts))
    return prompts


def _encode(prompts: tuple[Prompt, ...]) -> bytes:
    names = [item.name for item in fields(Prompt)]
    requests = [{name: getattr(prompt, name) for name in names} for prompt in prompts]
    return json.dumps({"requests": requests}, separators=(",", ":")).encode()


def _decode(data: bytes) -> tuple[Prompt, ...]:
    return tuple(map(_prompt, json.loads(data)["requests"]))


def _prompt(item: Mapping[str, Any]) -> Prompt:
    messages = item["messages"]
    frozen = {
        "token_ids": tuple(item["token_ids"]),
        "messages": None if messages is None else tuple(messages),
    }
    return Prompt(**{**item, **frozen})
