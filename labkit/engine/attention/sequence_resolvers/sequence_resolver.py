"""The base class of resolvers.

A resolver determines which sequence each unit of the grid works for. Resolvers differ in indexing,
never in arithmetic. A unit is a query token (decode kernel) or a Q-block of ``BQ`` rows (tiled
kernel). On the host, a resolver turns ``cu_seqlens_q`` into a *lookup*, the operand that the
kernels read. Each resolver has its own lookup type. The CPU's kernels are compiled once per type,
so no kernel branches on the resolver at run time.

Example: query lengths 1, 1 and 40 are ``cu_seqlens_q`` 0, 1, 2, 42. Token 5 belongs to sequence
2. With ``BQ`` = 32 the grid has ``42 // 32 + 3`` = 4 Q-blocks, one for each of the sequences 0
and 1 and two for sequence 2: rows 0 to 31, and 32 to 39.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from labkit.kernel_constants import BQ

Int32Array = NDArray[np.int32]


def has_prefill(cu_seqlens_q: Int32Array) -> bool:
    """Return whether a batch has more query tokens than sequences, so the tiled kernel may run."""
    return int(cu_seqlens_q[-1]) >= len(cu_seqlens_q)


def units_of(lengths: Int32Array, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sequence of each unit of ``rows`` query tokens, and its first row in it."""
    units = -(-lengths // rows)
    sequence = np.repeat(np.arange(len(lengths)), units)
    first = np.arange(len(sequence)) - np.repeat(np.cumsum(units) - units, units)
    return sequence, first * rows


class Resolver:
    """Builds a kernel's lookup on the host, and finds the sequence of a unit in the lookup.

    The static methods are plain functions of arrays and numbers. The CPU's kernels compile them
    in. The reference calls them directly.

    ``variant`` names the resolver code that is compiled into a kernel. Its id is part of a launch's
    stamp. ``name`` is the name in reports. ``lookup_type`` is the NamedTuple that ``lookup``
    returns.
    """

    variant: ClassVar[str]
    lookup_type: ClassVar[type[Any]]

    def __init__(self) -> None:
        self.name = self.variant

    def lookup(self, cu_seqlens_q: Int32Array, seq_lens: Int32Array) -> tuple[Any, float]:
        """Return the lookup, and the host time (us) of building its maps (0: it has no maps).

        ``cu_seqlens_q``, ``seq_lens``: int32 [num_seqs + 1] and [num_seqs]. The lookup may keep
        references to them. Raises ``ValueError`` if the resolver does not support this batch.
        """
        raise NotImplementedError

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Return a unit's (sequence, or -1 without work; packed query token; search steps)."""
        raise NotImplementedError

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        """Return a Q-block's (sequence, or -1 without work; first row in it; search steps)."""
        raise NotImplementedError

    @staticmethod
    def token_units(lookup: Any, cu: Any) -> int:
        """Return the number of one-token units in the grid."""
        return int(cu[-1])

    @staticmethod
    def qblock_units(lookup: Any, cu: Any) -> int:
        """Return the number of Q-blocks in the grid: an upper bound, so some have no work."""
        return int(cu[-1] // BQ + len(cu) - 1)

    def grid_axes(self, lookup: Any, tiled: bool, cu: Int32Array) -> tuple[int, ...]:
        """Return the grid's axes except that of heads. Their product is the number of units."""
        units = self.qblock_units if tiled else self.token_units
        return (units(lookup, cu),)

    def metal_operand(self, lookup: Any, tiled: bool) -> Int32Array | None:
        """Return the int32 array that a Metal kernel reads besides ``cu_seqlens_q``, or None."""
        return None

    def dependent_loads(self, iterations: int, units: int) -> int:
        """Return the number of loads by which all units together find their sequences.

        A unit must wait for each of these loads before it can continue. ``iterations`` is the sum
        of all units' search steps, counted by the kernel. ``units`` is the number of units
        launched.
        """
        return 0
