"""Resolvers: how a unit of the grid finds the sequence that it works for.

A resolver changes indexing, never arithmetic. On the host it turns ``cu_seqlens_q`` into
a *lookup*, the operand that the kernel reads; each kind of lookup is a type of its own,
and a kernel is compiled once per type, so that no kernel asks which resolver it runs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.resolvers import (
    binary_search,
    identity,
    padded_grid,
    seq_map,
    work_plan,
)

Lookup = (
    binary_search.BinarySearch
    | seq_map.SeqMap
    | identity.Identity
    | padded_grid.PaddedGrid
    | work_plan.WorkPlan
)
# What a kernel of each kind of lookup calls itself; a user's maps are a seq_map.
KINDS: dict[type[Lookup], str] = {
    binary_search.BinarySearch: "binary_search",
    seq_map.SeqMap: "seq_map",
    identity.Identity: "identity",
    padded_grid.PaddedGrid: "padded_grid",
    work_plan.WorkPlan: "work_plan",
}


class Resolver(Protocol):
    """Builds a kernel's lookup on the host."""

    name: str

    def lookup(
        self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], bq: int
    ) -> tuple[Lookup, float]:
        """Return the lookup for units of one and of ``bq`` tokens, and the time (us) of maps."""


_NAMED: dict[str, type[Resolver]] = {
    "binary_search": binary_search.BinarySearchResolver,
    "seq_map": seq_map.SeqMapResolver,
    "identity": identity.IdentityResolver,
    "padded_grid": padded_grid.PaddedGridResolver,
    "work_plan": work_plan.WorkPlanResolver,
}


def dependent_loads(lookup: Lookup, iterations: int, units: int) -> int:
    """Return the loads that units wait for, one after the other, to learn their sequence.

    Parameters
    ----------
    iterations
        Of the binary searches of all units, counted by the kernel: a load each.
    units
        Units launched; a map or a plan costs each of them one load.
    """
    if isinstance(lookup, binary_search.BinarySearch):
        return iterations
    mapped = isinstance(lookup, seq_map.SeqMap | work_plan.WorkPlan)
    return units if mapped else 0


def create(name: str) -> Resolver:
    """Return the resolver ``name``: a known word, or ``package.module:Class``.

    Raises
    ------
    ValueError
        The word is unknown, or the class cannot be loaded; one line that says why.
    """
    if name in _NAMED:
        return _NAMED[name]()
    if ":" in name:
        return seq_map.UserResolver(name)
    raise ValueError(f"resolver={name}: allowed are {', '.join(_NAMED)} or package.module:Class")
