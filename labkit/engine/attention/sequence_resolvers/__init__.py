"""Resolvers, by name: from a unit of a kernel's grid to its sequence (``sequence_resolver``).

A built-in resolver has a name in ``config.RESOLVERS``, a module with that name in this package, and
a branch in ``metal/kernels/resolve.metal``. Its id in the kernels is its index in
``config.RESOLVERS`` plus 1.
"""

from __future__ import annotations

from typing import Any

from labkit.config.engine.attention import RESOLVERS
from labkit.engine.attention.sequence_resolvers.binary_search import BinarySearchResolver
from labkit.engine.attention.sequence_resolvers.identity import IdentityResolver
from labkit.engine.attention.sequence_resolvers.padded_grid import PaddedGridResolver
from labkit.engine.attention.sequence_resolvers.seq_map import SeqMapResolver, UserResolver
from labkit.engine.attention.sequence_resolvers.sequence_resolver import Resolver
from labkit.engine.attention.sequence_resolvers.work_plan import WorkPlanResolver

_CLASSES: tuple[type[Resolver], ...] = (
    BinarySearchResolver,
    SeqMapResolver,
    IdentityResolver,
    PaddedGridResolver,
    WorkPlanResolver,
)
_BUILT_IN = {resolver.variant: resolver for resolver in _CLASSES}
assert set(_BUILT_IN) == set(RESOLVERS)
# The resolver by the type of its lookup. The maps of a user's class are a ``SeqMapLookup``.
BY_LOOKUP_TYPE: dict[type[Any], type[Resolver]] = {
    resolver.lookup_type: resolver for resolver in _CLASSES
}


def create(name: str) -> Resolver:
    """Return a built-in resolver or ``package.module:Class``; raise ``ValueError`` for others."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if ":" in name:
        return UserResolver(name)
    allowed = ", ".join(RESOLVERS)
    raise ValueError(f"resolver={name}: must be {allowed} or package.module:Class")
