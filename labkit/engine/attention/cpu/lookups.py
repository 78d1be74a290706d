"""The resolvers inside the CPU kernels: one compiled variant per type of lookup.

``find_token`` and ``find_qblock`` return (sequence, search iterations); a sequence of -1
marks a surplus Q-block.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.engine.attention.cpu.jit import inner, variants_of
from labkit.engine.attention.metadata import BQ
from labkit.engine.attention.resolvers.binary_search import BinarySearch
from labkit.engine.attention.resolvers.identity import Identity
from labkit.engine.attention.resolvers.seq_map import SeqMap

RESOLVER_IDS = {BinarySearch: 1, SeqMap: 2, Identity: 3}


def find_token(lookup: Any, token: int) -> Any:
    """Name the sequence that owns a packed query token."""


def find_qblock(lookup: Any, qblock: int) -> Any:
    """Name the sequence that owns a Q-block."""


def resolver_id(lookup: Any) -> Any:
    """Return the number that the kernel stamps for this type of lookup."""


def _is(lookup: Any, kind: type) -> bool:
    return isinstance(lookup, types.BaseNamedTuple) and lookup.instance_class is kind


@inner
def search_tokens(cu: Any, token: int) -> Any:
    """Find the largest ``i`` with ``cu[i] <= token``."""
    low, high, iterations = 0, len(cu) - 1, 0
    while low < high:
        middle = (low + high + 1) // 2
        iterations += 1
        if cu[middle] <= token:
            low = middle
        else:
            high = middle - 1
    return low, iterations


@inner
def search_qblocks(cu: Any, qblock: int) -> Any:
    """Find the largest ``i`` with ``cu[i] // BQ + i <= qblock``."""
    low, high, iterations = 0, len(cu) - 1, 0
    while low < high:
        middle = (low + high + 1) // 2
        iterations += 1
        if cu[middle] // BQ + middle <= qblock:
            low = middle
        else:
            high = middle - 1
    return low, iterations


@variants_of(find_token)
def _find_token(lookup: Any, token: Any) -> Any:
    if _is(lookup, BinarySearch):
        return lambda lookup, token: search_tokens(lookup.cu_seqlens_q, token)
    if _is(lookup, SeqMap):
        return lambda lookup, token: (lookup.token_map[token], 0)
    if _is(lookup, Identity):
        return lambda lookup, token: (token, 0)
    return None


@variants_of(find_qblock)
def _find_qblock(lookup: Any, qblock: Any) -> Any:
    if _is(lookup, BinarySearch):
        return lambda lookup, qblock: search_qblocks(lookup.cu_seqlens_q, qblock)
    if _is(lookup, SeqMap):
        return lambda lookup, qblock: (lookup.qblock_map[qblock], 0)
    return None


@variants_of(resolver_id)
def _resolver_id(lookup: Any) -> Any:
    for kind, number in RESOLVER_IDS.items():
        if _is(lookup, kind):
            return lambda lookup: number
    return None
