"""The resolvers inside the CPU kernels: one compiled variant per type of lookup.

A unit of the grid is a query token (decode) or a Q-block (tiled). ``find_token`` returns
(sequence, token, search iterations), ``find_qblock`` (sequence, first row, search
iterations); a sequence of -1 marks a surplus unit.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.engine.attention.cpu.jit import inner, variants_of
from labkit.engine.attention.resolvers import KINDS
from labkit.engine.attention.resolvers.binary_search import BinarySearch
from labkit.engine.attention.resolvers.identity import Identity
from labkit.engine.attention.resolvers.padded_grid import PaddedGrid
from labkit.engine.attention.resolvers.seq_map import SeqMap
from labkit.engine.attention.resolvers.work_plan import WorkPlan
from labkit.metal.dispatch import BQ
from labkit.metal.dispatch import RESOLVER_IDS as IDS

RESOLVER_IDS: dict[type[Any], int] = {kind: IDS[name] for kind, name in KINDS.items()}


def token_units(lookup: Any, cu: Any) -> Any:
    """Return how many units of one token the grid has."""


def qblock_units(lookup: Any, cu: Any) -> Any:
    """Return how many Q-blocks the grid has."""


def find_token(lookup: Any, unit: int, cu: Any) -> Any:
    """Name the sequence and the packed query token of a unit."""


def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
    """Name the sequence of a Q-block, and the row of the sequence that it begins with."""


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


@inner
def first_row(cu: Any, sequence: int, qblock: int) -> int:
    """Return the row of its sequence with which a Q-block of the packed grid begins."""
    row: int = (qblock - (cu[sequence] // BQ + sequence)) * BQ
    return row


@inner
def searched_qblock(cu: Any, qblock: int) -> Any:
    """Find a Q-block's sequence by search."""
    sequence, iterations = search_qblocks(cu, qblock)
    return sequence, first_row(cu, sequence, qblock), iterations


@inner
def mapped_qblock(qblock_map: Any, cu: Any, qblock: int) -> Any:
    """Look a Q-block's sequence up."""
    sequence = int(qblock_map[qblock])
    return sequence, first_row(cu, max(sequence, 0), qblock), 0


@inner
def padded_token(cu: Any, unit: int, tokens: int) -> Any:
    """Name the unit's token, or say that its sequence is shorter."""
    sequence, row = unit // tokens, unit % tokens
    token = cu[sequence] + row
    return (sequence if token < cu[sequence + 1] else -1), token, 0


@variants_of(token_units)
def _token_units(lookup: Any, cu: Any) -> Any:
    if _is(lookup, PaddedGrid):
        return lambda lookup, cu: lookup.tokens * (len(cu) - 1)
    if _is(lookup, WorkPlan):
        return lambda lookup, cu: len(lookup.tokens)
    return lambda lookup, cu: int(cu[-1])


@variants_of(qblock_units)
def _qblock_units(lookup: Any, cu: Any) -> Any:
    if _is(lookup, PaddedGrid):
        return lambda lookup, cu: lookup.qblocks * (len(cu) - 1)
    if _is(lookup, WorkPlan):
        return lambda lookup, cu: len(lookup.qblocks)
    return lambda lookup, cu: cu[-1] // BQ + len(cu) - 1


@variants_of(find_token)
def _find_token(lookup: Any, unit: Any, cu: Any) -> Any:
    if _is(lookup, BinarySearch):

        def searched(lookup: Any, unit: Any, cu: Any) -> Any:
            sequence, iterations = search_tokens(lookup.cu_seqlens_q, unit)
            return sequence, unit, iterations

        return searched
    if _is(lookup, SeqMap):
        return lambda lookup, unit, cu: (int(lookup.token_map[unit]), unit, 0)
    if _is(lookup, Identity):
        return lambda lookup, unit, cu: (unit, unit, 0)
    if _is(lookup, PaddedGrid):
        return lambda lookup, unit, cu: padded_token(cu, unit, lookup.tokens)
    if _is(lookup, WorkPlan):

        def planned(lookup: Any, unit: Any, cu: Any) -> Any:
            sequence = int(lookup.tokens[unit, 0])
            return sequence, cu[sequence] + lookup.tokens[unit, 1], 0

        return planned
    return None


@variants_of(find_qblock)
def _find_qblock(lookup: Any, unit: Any, cu: Any) -> Any:
    if _is(lookup, BinarySearch):
        return lambda lookup, unit, cu: searched_qblock(lookup.cu_seqlens_q, unit)
    if _is(lookup, SeqMap):
        return lambda lookup, unit, cu: mapped_qblock(lookup.qblock_map, cu, unit)
    if _is(lookup, PaddedGrid):
        return lambda lookup, unit, cu: (unit // lookup.qblocks, unit % lookup.qblocks * BQ, 0)
    if _is(lookup, WorkPlan):
        return lambda lookup, unit, cu: (lookup.qblocks[unit, 0], lookup.qblocks[unit, 1], 0)
    return None


@variants_of(resolver_id)
def _resolver_id(lookup: Any) -> Any:
    for kind, number in RESOLVER_IDS.items():
        if _is(lookup, kind):
            return lambda lookup: number
    return None
