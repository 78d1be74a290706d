"""The layers of a recorded step, over one KV memory: what is looked up once, and for each step."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.launch_report import Launches
from labkit.engine.attention.plan import Layer
from labkit.engine.cpu import arguments
from labkit.engine.cpu.recording import (
    BODY,
    ELEMENT,
    HEADS,
    K_POOL,
    KV_HEADS,
    LAUNCH_FIELDS,
    LAYER,
    NONCE,
    SLOT_NUMBERS,
    V_POOL,
)

Ints = NDArray[np.int64]
_OF_KIND = [BODY, HEADS, ELEMENT, SLOT_NUMBERS]


@dataclass(frozen=True, slots=True)
class Taken:
    """The launches of attention of a recorded step, in order, all arrays one row each.

    Parameters
    ----------
    all
        Their layers.
    rows
        Where they are among all launches.
    pools
        Addresses of keys and values, [launches, 2].
    sinks
        Addresses, or 0.
    """

    all: tuple[Layer, ...]
    rows: Ints
    pools: Ints
    sinks: Ints
    kinds: tuple[Layer, ...] = field(init=False)  # one layer of each kind
    _kind: Ints = field(init=False)  # of each launch
    _launches: Ints = field(init=False)  # as ``tape.replay`` takes them, but for what changes

    def __post_init__(self) -> None:
        """Derive what does not change."""
        kinds = {layer.kind: layer for layer in self.all}
        order = list(kinds)
        launches = np.zeros((len(self.all), LAUNCH_FIELDS), np.int64)
        launches[:, KV_HEADS] = [layer.num_kv_heads for layer in self.all]
        launches[:, K_POOL : V_POOL + 1] = self.pools
        object.__setattr__(self, "kinds", tuple(kinds.values()))
        object.__setattr__(self, "_kind", np.array([order.index(x.kind) for x in self.all]))
        object.__setattr__(self, "_launches", launches)

    def packed(self, kinds: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one of ``arguments.LAYERS`` for each launch, made of that of each kind."""
        packed = np.repeat(kinds[0], len(self.all))
        for i, one in enumerate(kinds[1:], 1):
            packed[self._kind == i] = one
        return packed

    def left(self, nonces: NDArray[np.uint32], rows: Ints) -> list[Launches]:
        """Return what the launches left, those of one kind together."""
        wide = nonces.astype(np.uint64)
        if len(self.kinds) == 1:
            return [Launches(self.all, wide, rows)]
        chosen = [np.flatnonzero(self._kind == i) for i in range(len(self.kinds))]
        return [Launches([self.all[i] for i in one], wide[one], rows[one]) for one in chosen]

    def nonces(self) -> NDArray[np.uint32]:
        """Draw a number for each launch."""
        return np.frombuffer(secrets.token_bytes(4 * len(self.all)), np.uint32)

    def launches(
        self, packed: NDArray[Any], nonces: NDArray[np.uint32], kinds: Sequence[tuple[int, ...]]
    ) -> Ints:
        """Return what ``tape.replay`` is told; ``kinds``: body, heads, element and slot numbers."""
        launches = self._launches.copy()
        launches[:, _OF_KIND] = np.array(kinds, np.int64)[self._kind]
        launches[:, LAYER] = arguments.address(packed) + packed.itemsize * np.arange(len(packed))
        launches[:, NONCE] = nonces
        return launches
