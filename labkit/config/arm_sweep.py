"""Sweeps: lists of values of options, whose combinations are the arms of an ablation."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config.option import override_text, require

SWEPT_GROUPS = ("engine", "model")  # options that arms may differ in and still do the same work
MAX_NAME_BYTES = 150  # of an arm: files are named by it


def check_sweep(sweep: Mapping[str, Any], place: str) -> None:
    """Check a sweep ``{option: [values]}``; ``place`` is its key, for error messages.

    Raises ``ConfigError`` if an option is not in one of the groups that may differ between arms, or
    its values are not a list of two or more different values.
    """
    for key, values in sweep.items():
        require(
            key_parts(key)[0] in SWEPT_GROUPS,
            f"{place}: {key}: must be an option of {' or '.join(SWEPT_GROUPS)}",
        )
        require(
            isinstance(values, list) and len(set(map(_whole_text, values))) > 1,
            f"{place}: {key}: must be a list of two or more different values, not {values!r}",
        )


def key_parts(key: str) -> list[str]:
    """Return the names in the key of an option or a group.

    >>> key_parts("engine.kv.dtype"), key_parts("engine/kv")
    (['engine', 'kv', 'dtype'], ['engine', 'kv'])
    """
    return re.split(r"[./]", key)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name for each option key: the shortest ending that no other key has.

    >>> list(short_names(["engine.dtype", "engine.kv.dtype", "engine.scheduler.order"]).values())
    ['engine.dtype', 'kv.dtype', 'order']
    """
    names = {key: key_parts(key)[-1:] for key in keys}
    while True:
        texts = [".".join(name) for name in names.values()]
        for key, name in names.items():
            parts = key_parts(key)
            if texts.count(".".join(name)) > 1 and len(name) < len(parts):
                names[key] = parts[-len(name) - 1 :]
        if texts == [".".join(name) for name in names.values()]:
            return dict(zip(names, texts, strict=True))


def swept_overrides(sweep: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return the overrides of every combination of a sweep's values, by the name of its arm.

    >>> list(swept_overrides({"engine.scheduler.order": ["a", "b"], "engine.threads": [1, 2]}))
    ['order=a,threads=1', 'order=a,threads=2', 'order=b,threads=1', 'order=b,threads=2']
    """
    short = short_names(list(sweep))
    arms: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*sweep.values()):
        overrides = dict(zip(sweep, values, strict=True))
        text = ",".join(f"{short[key]}={_value_name(value)}" for key, value in overrides.items())
        taken = text.casefold() in map(str.casefold, arms)  # each arm has files of its name
        if taken or len(text.encode()) > MAX_NAME_BYTES:
            digest = hashlib.sha256(repr(overrides).encode()).hexdigest()[:8]
            kept = text.encode()[: MAX_NAME_BYTES - len(digest) - 1]
            text = f"{kept.decode(errors='ignore')}-{digest}"
        arms[text] = overrides
    return arms


def _value_name(value: Any) -> str:
    text = _whole_text(value).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]", "_", text)


def _whole_text(value: Any) -> str:
    """Return a value as text, a list with all its items.

    >>> _whole_text([4, 16]), _whole_text([])
    ('4-16', 'none')
    """
    if isinstance(value, list):
        return "-".join(map(override_text, value)) or "none"
    return override_text(value)
