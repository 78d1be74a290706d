"""Numbers with units in overrides: ``engine.memory_limit=1GiB``, ``design.time=10m``."""

from __future__ import annotations

import re
from decimal import Decimal

from labkit.config.option_index import find_option

FACTORS: dict[str, dict[str, int]] = {
    "bytes": {
        **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
        **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    },
    "seconds": {"s": 1, "m": 60, "min": 60, "h": 3600},
}
NUMBERS = {
    unit: re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)({'|'.join(factors)})(?![\w.])")
    for unit, factors in FACTORS.items()
}


def in_units_of_option(override: str) -> str:
    """Convert numbers such as ``1GiB`` or ``10m`` in an override to the unit of its option.

    >>> in_units_of_option("engine.memory_limit=512MiB,1GiB")
    'engine.memory_limit=536870912,1073741824'
    >>> in_units_of_option("design.time=10m")
    'design.time=600'
    """
    key, equals, value = override.partition("=")
    entry = find_option(key.lstrip("+"))
    unit = entry.option.unit if entry is not None else ""
    if not equals or unit not in FACTORS:
        return override

    def number(match: re.Match[str]) -> str:
        product = Decimal(match.group(1)) * FACTORS[unit][match.group(2)]
        return f"{product.normalize():f}"

    return f"{key}={NUMBERS[unit].sub(number, value.strip(chr(39)))}"
