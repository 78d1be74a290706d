"""Lengths of requests, drawn from the workload's distribution, and the KV slots they need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from math import log

import numpy as np

from labkit.config import LengthKind, Lengths


def draw(lengths: Lengths, rng: np.random.Generator, count: int) -> list[int]:
    """Draw ``count`` lengths in tokens. Fixed and listed lengths do not use ``rng``."""
    if lengths.kind is LengthKind.fixed:
        return [lengths.tokens] * count
    if lengths.kind is LengthKind.listed:
        return list(islice(cycle(lengths.values), count))
    low, high = lengths.bounds
    if lengths.kind is LengthKind.uniform:
        return [int(n) for n in rng.integers(low, high, count, endpoint=True)]
    assert lengths.median is not None and lengths.sigma is not None
    drawn = rng.lognormal(log(lengths.median), lengths.sigma, count)
    # Clipped as floats: a wide distribution may exceed an integer's range.
    return [int(n) for n in np.clip(drawn, low, high).astype(int)]


def rectangle_notes(lengths: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the KV slots of the requests without padding and in one padded rectangular batch.

    ``lengths``: prompt and output tokens of each request, as served. In the rectangle, every row
    has the length of the longest prompt plus the longest output. The last output token needs no
    slot.
    """
    longest = max(p for p, _ in lengths) + max(o for _, o in lengths) - 1
    return {"tokens": sum(p + o - 1 for p, o in lengths), "slots": len(lengths) * longest}
