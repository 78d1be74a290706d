"""Configs of earlier versions of labkit: former names, defaults and meanings of options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from labkit.config.engine.openai_server import PRESETS
from labkit.config.option import ReadBy
from labkit.config.option_index import find_option, option_groups, value_of
from labkit.config.serialization import to_plain


def with_present_names(config: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, Any]:
    """Return an arm's config as this version writes it, if the options mean the same.

    Former names and values are replaced: ``engine.attention.gqa_sharing=true`` by ``unit=auto``,
    ``model.shape.architecture=qwen3`` by nothing, a preset's own timeout by null. The value false
    of ``gqa_sharing`` keeps its former name, and thus differs from any config of today: on the CPU,
    its units served one query head of each of several KV heads. An option that the rest of the
    config does not read is left out unless an override ``named`` it: it is a former default.
    """
    found = deepcopy(dict(config))
    engine = found.get("engine") or {}
    attention, server = (engine.get(group) or {} for group in ("attention", "server"))
    if attention.get("gqa_sharing") is True:
        del attention["gqa_sharing"]
        attention.setdefault("unit", "auto")
    if ((found.get("model") or {}).get("shape") or {}).get("architecture") == "qwen3":
        del found["model"]["shape"]["architecture"]
    preset = PRESETS.get(server.get("preset", ""))
    if preset is not None and server.get("start_timeout_s") == preset.start_timeout_s:
        server["start_timeout_s"] = None
    for key, read_by in _conditions():
        choice = value_of(found, read_by.key, ...)
        if choice is not ... and choice not in read_by and key not in named:
            place, _, name = key.rpartition(".")
            group = value_of(found, place)
            if isinstance(group, dict):
                group.pop(name, None)
    return found


def with_former_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an arm that is alone in its process, as earlier versions read it, too.

    Warm caches are hot there: every launch follows one of the same arm.
    """
    found = dict(config)
    if value_of(found, "workload.state") == "warm":
        found["workload"] = {**found["workload"], "state": "hot"}
    return found


def default_of(key: str) -> Any:
    """Return an option's default in JSON types; None if there is no such option."""
    entry = find_option(key)
    return None if entry is None else to_plain(entry.option.default)


def other_meanings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an arm of an earlier version asks otherwise than it did, one text each."""
    attention = (config.get("engine") or {}).get("attention") or {}
    if attention.get("gqa_sharing") is False and attention.get("device") == "cpu":
        yield (
            "engine.attention.unit=head (the author: gqa_sharing=false, whose units served one "
            "query head of each of several KV heads)"
        )


@cache
def _conditions() -> list[tuple[str, ReadBy]]:
    """Return each option that another one may leave unread, and when it is read."""
    found = []
    for entry in (entry for group in option_groups() for entry in group.entries):
        by = entry.option.read_by
        if by is not None and "." in by.key and "[]" not in entry.key:
            choices = tuple(getattr(choice, "value", choice) for choice in by.choices)
            found.append((entry.key, ReadBy(by.key, choices)))
    return found
