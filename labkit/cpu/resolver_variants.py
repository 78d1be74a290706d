"""The resolvers inside the CPU kernels: one compiled variant for each type of lookup.

A launch's ``lookup`` is a NamedTuple whose type says which resolver built it. numba compiles a
kernel once per type of lookup and calls that resolver's functions in it, so that no kernel asks at
run time which resolver it has. The functions are registered by whoever owns the resolvers.
"""

from __future__ import annotations

from typing import Any, Protocol

from numba import types

from labkit.cpu.jit import variants_of
from labkit.kernel_abi import RESOLVER_IDS


class DeviceFunctions(Protocol):
    """The functions of a resolver that a kernel calls; numba compiles them.

    A unit of the grid is one query token (decode) or one Q-block (tiled).
    """

    @property
    def variant(self) -> str:
        """A key of ``RESOLVER_IDS``."""

    def token_units(self, lookup: Any, cu: Any) -> Any:
        """Return how many units of one token the grid has."""

    def qblock_units(self, lookup: Any, cu: Any) -> Any:
        """Return how many Q-blocks the grid has."""

    def find_token(self, lookup: Any, unit: Any, cu: Any) -> Any:
        """Return a unit's sequence (-1: surplus unit), packed query token and search steps."""

    def find_qblock(self, lookup: Any, unit: Any, cu: Any) -> Any:
        """Return a Q-block's sequence (-1: surplus), first row in it and search steps."""


_FUNCTIONS: dict[type[Any], DeviceFunctions] = {}


def register(lookup_type: type[Any], functions: DeviceFunctions) -> None:
    """Have kernels call these functions for lookups of this NamedTuple type."""
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
    """Return the lookup's number in ``RESOLVER_IDS``, which goes into the stamp."""


def _functions(lookup: Any) -> DeviceFunctions | None:
    """Return the functions for a numba type, or None if it is no registered lookup."""
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
