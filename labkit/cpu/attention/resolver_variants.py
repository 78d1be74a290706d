"""The resolvers inside the CPU kernels: one compiled variant of each kernel per resolver.

A resolver maps a unit of the grid to its sequence. A launch's ``lookup`` is a NamedTuple with the
resolver's data, and its type identifies the resolver. numba compiles a kernel once per type of
lookup with calls of that resolver's functions, so that kernels need no branch at run time. Whoever
launches the kernels registers the resolvers' functions first (``engine.attention``'s CPU backend).

A unit is one query token (decode) or one Q-block (tiled). ``cu`` is ``cu_seqlens_q``, int32
[num_seqs + 1]. The sequence of a surplus unit is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from labkit.cpu.runtime.jit import variants_of
from labkit.kernel_constants import RESOLVER_IDS

_RESOLVERS: dict[type[Any], Any] = {}


def register(lookup_type: type[Any], resolver: Any) -> None:
    """Register the resolver whose functions kernels call for lookups of this NamedTuple type.

    Its ``variant`` is a key of ``RESOLVER_IDS``. numba compiles its static methods, which have the
    names of the functions below.
    """
    _RESOLVERS[lookup_type] = resolver


def _resolver(lookup: Any) -> Any:
    """Return the resolver of a lookup's numba type, or None if the type is not registered."""
    is_tuple = isinstance(lookup, types.BaseNamedTuple)
    return _RESOLVERS.get(lookup.instance_class) if is_tuple else None


def _of_resolver(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Let a call of this function in a kernel be one of the resolver's function of its name."""

    def choose(lookup: Any, *_others: Any) -> Any:
        return getattr(_resolver(lookup), stub.__name__, None)

    variants_of(stub)(choose)
    return stub


@_of_resolver
def token_units(lookup: Any, cu: Any) -> Any:
    """Return the number of units of a decode grid."""


@_of_resolver
def qblock_units(lookup: Any, cu: Any) -> Any:
    """Return the number of Q-blocks of a tiled grid."""


@_of_resolver
def find_token(lookup: Any, unit: int, cu: Any) -> Any:
    """Return a unit's sequence, its query token and the number of search steps."""


@_of_resolver
def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
    """Return a Q-block's sequence, its first row there and the number of search steps."""


def resolver_id(lookup: Any) -> Any:
    """Return the id in ``RESOLVER_IDS`` of the lookup's resolver, which the stamp encodes."""


@variants_of(resolver_id)
def _resolver_id(lookup: Any) -> Any:
    resolver = _resolver(lookup)
    if resolver is None:
        return None
    number = RESOLVER_IDS[resolver.variant]
    return lambda lookup: number
