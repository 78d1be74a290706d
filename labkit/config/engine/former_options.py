"""Configs of earlier versions of labkit: former names, defaults and meanings of options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from labkit.config.engine.openai_server import PRESETS
from labkit.config.option import ReadBy
from labkit.config.option_index import find_option, option_groups
from labkit.config.serialization import to_plain


def with_present_names(config: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, Any]:
    """Return an arm's config as this version writes it, if the options mean the same.

    Former names and values are replaced: ``engine.attention.gqa_sharing=true`` by ``unit=auto``,
    ``model.shape.architecture=qwen3`` by nothing, a preset's own timeout by null. The value false
    of ``gqa_sharing`` keeps its former name, and thus differs from any config of today: on the CPU,
    its units served one query head of each of several KV heads. An option that the rest of the
    config does not read is left out unless an override ``named`` it: it is a former default.
    """
    found = _copied(config)
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
    for path, by, read_by in _conditions():
        choice = _value(found, by)
        if choice is not ... and choice not in read_by and ".".join(path) not in named:
            group = _value(found, path[:-1])
            if isinstance(group, dict):
                group.pop(path[-1], None)
    return found


def with_former_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an arm that is alone in its process, as earlier versions read it, too.

    Warm caches are hot there: every launch follows one of the same arm.
    """
    found = _copied(config)
    if _value(found, ("workload", "state")) == "warm":
        found["workload"]["state"] = "hot"
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


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in config.items()}


def _value(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return an option's value or a group; ``...`` if the config has neither."""
    value: Any = config
    for name in path:
        value = value.get(name, ...) if isinstance(value, Mapping) else ...
    return value


@cache
def _conditions() -> tuple[tuple[tuple[str, ...], tuple[str, ...], ReadBy], ...]:
    """Return each option that another one may leave unread, and that one, as paths."""
    options = (entry for group in option_groups() for entry in group.entries)
    found = []
    for key, by in ((entry.key, entry.option.read_by) for entry in options):
        if by is not None and "." in by.key and "[]" not in key:
            choices = tuple(getattr(choice, "value", choice) for choice in by.choices)
            paths = tuple(key.split(".")), tuple(by.key.split("."))
            found.append((*paths, ReadBy(by.key, choices)))
    return tuple(found)
