"""The cache of prompts, which passes them from the parent to the workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from labkit.machine import cache_entries
from labkit.workload.tokenized_prompt import Prompt

FORMAT = 8  # version of the cached file's format and of its generation; part of the cache key


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
