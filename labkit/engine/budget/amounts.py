"""Bytes and fractions as people write them, and rounding that stays inside two bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

UNITS = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))
DECIMALS = range(2, 10)


def size(count: int) -> str:
    """Write bytes in the largest unit that they reach."""
    for unit, scale, decimals in UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.{decimals}f} {unit}"
    return f"{count} bytes"


def fraction_up(low: float, high: float) -> float | None:
    """Return the shortest decimal that is just above ``low`` and at most ``high``."""
    return _shortest(low, high, low, math.ceil)


def fraction_down(low: float, high: float) -> float | None:
    """Return the shortest decimal that is just below ``high`` and at least ``low``."""
    return _shortest(low, high, high, math.floor)


def _shortest(low: float, high: float, edge: float, toward: Callable[[float], int]) -> float | None:
    for decimals in DECIMALS:
        value: float = toward(edge * 10**decimals) / 10**decimals
        if low <= value <= min(high, 1.0) and value > 0:
            return value
    return None
