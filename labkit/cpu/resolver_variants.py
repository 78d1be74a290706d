"""The resolvers inside the CPU kernels: one compiled variant per type of lookup.

A unit of the grid is a query token (decode) or a Q-block (tiled). What a variant does is
written in the resolver's own file.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.cpu.jit import variants_of
from labkit.engine.attention.kernel_switches import RESOLVER_IDS
from labkit.engine.attention.resolvers import BY_LOOKUP_TYPE


def token_units(lookup: Any, cu: Any) -> Any:
    """Return how many units of one token the grid has."""


def qblock_units(lookup: Any, cu: Any) -> Any:
    """Return how many Q-blocks the grid has."""


def find_token(lookup: Any, unit: int, cu: Any) -> Any:
    """Name the sequence and the packed query token of a unit; see ``resolvers.resolver``."""


def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
    """Name the sequence of a Q-block, and the row of the sequence that it begins with."""


def resolver_id(lookup: Any) -> Any:
    """Return the number that the kernel stamps for this type of lookup."""


def _resolver(lookup: Any) -> Any:
    """Return the resolver whose lookup has this type."""
    is_tuple = isinstance(lookup, types.BaseNamedTuple)
    return BY_LOOKUP_TYPE.get(lookup.instance_class) if is_tuple else None


@variants_of(token_units)
def _token_units(lookup: Any, cu: Any) -> Any:
    return getattr(_resolver(lookup), "token_units", None)


@variants_of(qblock_units)
def _qblock_units(lookup: Any, cu: Any) -> Any:
    return getattr(_resolver(lookup), "qblock_units", None)


@variants_of(find_token)
def _find_token(lookup: Any, unit: Any, cu: Any) -> Any:
    return getattr(_resolver(lookup), "find_token", None)


@variants_of(find_qblock)
def _find_qblock(lookup: Any, unit: Any, cu: Any) -> Any:
    return getattr(_resolver(lookup), "find_qblock", None)


@variants_of(resolver_id)
def _resolver_id(lookup: Any) -> Any:
    found = _resolver(lookup)
    if found is None:
        return None
    number = RESOLVER_IDS[found.variant]
    return lambda lookup: number
