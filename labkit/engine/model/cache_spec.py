"""What a layer of a model caches, as read from the caches that mlx_lm makes for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of every token. A query sees the last ``window`` of them (None: all)."""

    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent or convolution state: ``num_arrays`` arrays for each request."""

    num_arrays: int


# A layer with several caches (mlx_lm's ``CacheList``) has a tuple of specs.
CacheSpec = AttentionSpec | StateSpec | tuple["CacheSpec", ...]


def leaves(specs: Sequence[CacheSpec]) -> Iterator[AttentionSpec | StateSpec]:
    """Yield the spec of every single cache, layer by layer. A layer may have several."""
    for spec in specs:
        if isinstance(spec, tuple):
            yield from leaves(spec)
        else:
            yield spec
