"""The resolver ``seq_map``: tables from the host with the sequence of every token and Q-block.

``token_map`` int32 [total_q] has the sequence of every token. ``qblock_map`` int32 [total_q // BQ +
num_seqs] has the sequence of every Q-block, or -1 for a surplus Q-block. It is empty in a batch
without prefill, which never runs the tiled kernel. A user's class may supply both. Wrong maps with
values in range are not detected here: the identity gate catches them.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from labkit.engine import user_classes
from labkit.engine.attention.sequence_resolvers.sequence_resolver import (
    Int32Array,
    Resolver,
    has_prefill,
)
from labkit.kernel_constants import BQ

SURPLUS = -1


class SeqMapLookup(NamedTuple):
    """The lookup: the two maps that the module docstring describes."""

    token_map: Int32Array
    qblock_map: Int32Array


def token_map(cu_seqlens_q: Int32Array) -> Int32Array:
    """Return int32 [total_q]: the sequence of every packed query token."""
    sequences = np.arange(len(cu_seqlens_q) - 1, dtype=np.int32)
    return np.repeat(sequences, np.diff(cu_seqlens_q))


def qblock_map(cu_seqlens_q: Int32Array, total_q: int, bq: int) -> Int32Array:
    """Return int32 [total_q // bq + num_seqs]: the sequence of every Q-block, -1 if surplus.

    Sequence ``s`` has ``ceil(len / bq)`` Q-blocks, starting at ``cu[s] // bq + s``.
    """
    sequences = np.arange(len(cu_seqlens_q) - 1, dtype=np.int32)
    first = cu_seqlens_q[:-1] // bq + sequences
    counts = -(-np.diff(cu_seqlens_q) // bq)
    owner = np.repeat(sequences, counts)
    start_in_owner = np.repeat(np.cumsum(counts) - counts, counts)
    block = first[owner] + np.arange(len(owner)) - start_in_owner
    blocks = np.full(total_q // bq + len(sequences), SURPLUS, dtype=np.int32)
    blocks[block] = owner
    return blocks


class SeqMapResolver(Resolver):
    """Builds with NumPy the maps that a batch needs."""

    variant = "seq_map"
    lookup_type = SeqMapLookup

    def lookup(self, cu_seqlens_q: Int32Array, seq_lens: Int32Array) -> tuple[SeqMapLookup, float]:
        start = time.perf_counter()
        total_q = int(cu_seqlens_q[-1])
        qblocks = (
            qblock_map(cu_seqlens_q, total_q, BQ)
            if has_prefill(cu_seqlens_q)
            else np.empty(0, np.int32)
        )
        maps = SeqMapLookup(token_map(cu_seqlens_q), qblocks)
        return maps, (time.perf_counter() - start) * 1e6

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        return int(lookup.token_map[unit]), unit, 0

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        sequence = int(lookup.qblock_map[unit])
        owner = max(sequence, 0)
        return sequence, (unit - (cu[owner] // BQ + owner)) * BQ, 0

    def metal_operand(self, lookup: Any, tiled: bool) -> Int32Array:
        return lookup.qblock_map if tiled else lookup.token_map  # type: ignore[no-any-return]

    def dependent_loads(self, iterations: int, units: int) -> int:
        return units


class UserResolver(SeqMapResolver):
    """A resolver that gets its maps from a user's class.

    The class has an attribute ``name`` and a method ``maps(cu_seqlens_q, total_q, bq)``.

    ``path``: ``package.module:Class``. The class is called without arguments. Raises ``ValueError``
    if the class cannot be imported or called, or lacks ``name`` or ``maps``.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._user_resolver = user_classes.create_plugin("resolver", path, ("maps",))
        self.name = self._user_resolver.name

    def lookup(self, cu_seqlens_q: Int32Array, seq_lens: Int32Array) -> tuple[SeqMapLookup, float]:
        """Return the user's maps, checked for type, shape and range, and the time (us) of ``maps``.

        Raises ``ValueError`` if ``maps`` failed, or returned arrays that a kernel must not read.
        """
        start, total_q = time.perf_counter(), int(cu_seqlens_q[-1])
        try:
            maps = self._user_resolver.maps(cu_seqlens_q.copy(), total_q, BQ)
        except Exception as error:
            raise ValueError(
                f"resolver={self._path}: maps() raised "
                f"{user_classes.describe_error(error, self._path)}"
            ) from error
        map_us = (time.perf_counter() - start) * 1e6
        if not isinstance(maps, tuple | list) or len(maps) != 2:
            raise ValueError(f"resolver={self._path}: maps() must return (token_map, qblock_map)")
        num_seqs = len(cu_seqlens_q) - 1
        lookup = SeqMapLookup(
            self._checked("token_map", maps[0], total_q, 0, num_seqs),
            self._checked("qblock_map", maps[1], total_q // BQ + num_seqs, SURPLUS, num_seqs),
        )
        return lookup, map_us

    def _checked(self, name: str, array: Any, length: int, low: int, end: int) -> Any:
        """Return a copy of ``array``, which must be int32 [length] with values in [low, end)."""
        where = f"resolver={self._path}: {name}"
        if not isinstance(array, np.ndarray) or array.dtype != np.int32:
            dtype = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{where} must be a NumPy array of int32, not {dtype}")
        if array.shape != (length,):
            raise ValueError(f"{where} must have shape ({length},), not {array.shape}")
        out_of_range = np.flatnonzero((array < low) | (array >= end))
        if len(out_of_range):
            i = out_of_range[0]
            raise ValueError(f"{where}[{i}] is {array[i]}; it must be {low} to {end - 1}")
        return np.array(array)
