"""The resolvers inside the CPU kernels: one compiled variant of each kernel per resolver.

A resolver maps a unit of the grid to its sequence. A launch's ``lookup`` is a NamedTuple with the
resolver's data, and its type identifies the resolver. numba compiles a kernel once per type of
lookup with calls of that resolver's functions, so that kernels need no branch at run time. Whoever
launches the kernels registers the resolvers' functions first (``engine.attention``'s CPU backend).
"""

from __future__ import annotations

from typing import Any, Protocol

from numba import types

from labkit.cpu.runtime.jit import variants_of
from labkit.kernel_constants import RESOLVER_IDS


class DeviceFunctions(Protocol):
    """The functions of a resolver that kernels call and numba compiles.

    A unit of the grid is one query token (decode) or one Q-block (tiled). ``cu`` is
    ``cu_seqlens_q``, int32 [num_seqs + 1].
    """

    @property
    def variant(self) -> str:
        """The resolver's name, a key of ``RESOLVER_IDS``."""

    def token_units(self, lookup: Any, cu: Any) -> Any:
        """Return the number of units of a decode grid."""

    def qblock_units(self, lookup: Any, cu: Any) -> Any:
        """Return the number of Q-blocks of a tiled grid."""

    def find_token(self, lookup: Any, unit: Any, cu: Any) -> Any:
        """Return a unit's sequence, its query token and the number of search steps.

        The sequence is -1 for a surplus unit.
        """

    def find_qblock(self, lookup: Any, unit: Any, cu: Any) -> Any:
        """Return a Q-block's sequence, its first row there and the number of search steps.

        The sequence is -1 for a surplus unit.
        """


_FUNCTIONS: dict[type[Any], DeviceFunctions] = {}


def register(lookup_type: type[Any], functions: DeviceFunctions) -> None:
    """Register the functions that kernels call for lookups of this NamedTuple type."""
    _FUNCTIONS[lookup_type] = functions


def token_units(lookup: Any, cu: Any) -> Any:
    """Call ``DeviceFunctions.token_units`` of the lookup's resolver."""


def qblock_units(lookup: Any, cu: Any) -> Any:
    """Call ``DeviceFunctions.qblock_units`` of the lookup's resolver."""


def find_token(lookup: Any, unit: int, cu: Any) -> Any:
    """Call ``DeviceFunctions.find_token`` of the lookup's resolver."""


def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
    """Call ``DeviceFunctions.find_qblock`` of the lookup's resolver."""


def resolver_id(lookup: Any) -> Any:
    """Return the id in ``RESOLVER_IDS`` of the lookup's resolver, which the stamp encodes."""


def _functions(lookup: Any) -> DeviceFunctions | None:
    """Return the functions for a lookup's numba type, or None if the type is not registered."""
    is_tuple = isinstance(lookup, types.BaseNamedTuple)
    return _FUNCTIONS.get(lookup.instance_class) if is_tuple else None


@variants_of(token_units)
def _token_units(lookup: Any, cu: Any) -> Any:
    return getattr(_functions(lookup), "token_units", None)


@variants_of(qblock_units)
def _qblock_units(lookup: Any, cu: Any) -> Any:
    return getattr(_functions(lookup), "qblock_units", None)


@variants_of(find_token)
def _find_token(lookup: Any, unit: Any, cu: Any) -> Any:
    return getattr(_functions(lookup), "find_token", None)


@variants_of(find_qblock)
def _find_qblock(lookup: Any, unit: Any, cu: Any) -> Any:
    return getattr(_functions(lookup), "find_qblock", None)


@variants_of(resolver_id)
def _resolver_id(lookup: Any) -> Any:
    functions = _functions(lookup)
    if functions is None:
        return None
    number = RESOLVER_IDS[functions.variant]
    return lambda lookup: number
