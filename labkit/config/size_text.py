"""Sizes in overrides: ``engine.memory_limit=1GiB`` for an option in bytes."""

from __future__ import annotations

import re

from labkit.config.option_index import find_option

FACTORS = {
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
SIZE = re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)({'|'.join(FACTORS)})(?![\w.])")


def sizes_in_bytes(override: str) -> str:
    """Convert sizes such as ``1GiB`` in an override to bytes, if its option is in bytes.

    >>> sizes_in_bytes("engine.memory_limit=512MiB,1GiB")
    'engine.memory_limit=536870912,1073741824'
    """
    key, equals, value = override.partition("=")
    entry = find_option(key.lstrip("+"))
    if not equals or entry is None or entry.option.unit != "bytes":
        return override
    return f"{key}={SIZE.sub(_bytes, value.strip(chr(39)))}"


def _bytes(match: re.Match[str]) -> str:
    return str(round(float(match.group(1)) * FACTORS[match.group(2)]))
