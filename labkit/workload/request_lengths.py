"""Lengths of requests: drawn as a workload describes them, and the rectangle that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from math import log

import numpy as np

from labkit.config import LengthKind, Lengths


def draw(lengths: Lengths, rng: np.random.Generator, count: int) -> list[int]:
    """Draw so many lengths (tokens); fixed and listed ones take nothing from ``rng``."""
    if lengths.kind is LengthKind.fixed:
        return [lengths.tokens] * count
    if lengths.kind is LengthKind.listed:
        return list(islice(cycle(lengths.values), count))
    low, high = lengths.bounds
    if lengths.kind is LengthKind.uniform:
        return [int(n) for n in rng.integers(low, high, count, endpoint=True)]
    assert lengths.median is not None and lengths.sigma is not None
    drawn = rng.lognormal(log(lengths.median), lengths.sigma, count)
    # Cut as floats: a wide law may exceed what an integer holds.
    return [int(n) for n in np.clip(drawn, low, high).astype(int)]


def rectangle_notes(own: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the rows that requests need, and those of one rectangle of them all.

    ``own``: prompt and output tokens of each, as they were served.
    ``slots``: every request as long as the longest prompt and the longest answer. An answer's last
    token is not computed.
    """
    longest = max(p for p, _ in own) + max(o for _, o in own) - 1
    return {"tokens": sum(p + o - 1 for p, o in own), "slots": len(own) * longest}
