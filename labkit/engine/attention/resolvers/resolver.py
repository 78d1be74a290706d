"""What a resolver is: one class in one file, named by its word in the config.

A resolver tells each unit of the grid which sequence it works for; it changes indexing,
never arithmetic. On the host it turns ``cu_seqlens_q`` into a *lookup*, the operand that the
kernels read. Each kind of lookup is a type of its own, and the CPU's kernels are compiled
once per type, so that no kernel asks which resolver it runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from labkit.kernel_abi import BQ

Ints = NDArray[np.int32]


class Resolver:
    """Builds a kernel's lookup on the host, and says how a unit reads it.

    The static methods are plain functions of arrays and numbers: the CPU's kernels compile
    them in, the reference calls them as they are. A unit is a query token (decode) or a
    Q-block of ``BQ`` rows (tiled).

    ``variant``: what the kernels know it by, and stamp; ``name``: what reports call it;
    ``lookup_type``: the type of its lookups, a NamedTuple.
    """

    variant: ClassVar[str]
    lookup_type: ClassVar[type[Any]]

    def __init__(self) -> None:
        self.name = self.variant

    def lookup(self, cu_seqlens_q: Ints, seq_lens: Ints) -> tuple[Any, float]:
        """Return the lookup and the host's time (us) of building its maps, 0 without maps.

        Parameters
        ----------
        cu_seqlens_q, seq_lens
            int32 [num_seqs + 1] and [num_seqs]; the lookup may keep them.

        Raises
        ------
        ValueError
            It does not take such a batch, in one line.
        """
        raise NotImplementedError

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Return a unit's (sequence, packed query token, search steps); -1: it is surplus."""
        raise NotImplementedError

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        """Return a Q-block's (sequence, first row in it, search steps); -1: it is surplus."""
        raise NotImplementedError

    @staticmethod
    def token_units(lookup: Any, cu: Any) -> int:
        """Return how many units of one token the grid has."""
        return int(cu[-1])

    @staticmethod
    def qblock_units(lookup: Any, cu: Any) -> int:
        """Return how many Q-blocks the grid has: a bound that needs no query length."""
        return int(cu[-1] // BQ + len(cu) - 1)

    def grid_axes(self, lookup: Any, tiled: bool, cu: Ints) -> tuple[int, ...]:
        """Return the grid's axes without heads; what they multiply to is the units."""
        units = self.qblock_units if tiled else self.token_units
        return (units(lookup, cu),)

    def metal_operand(self, lookup: Any, tiled: bool) -> Ints | None:
        """Return what a Metal kernel reads besides ``cu_seqlens_q``: int32, or None."""
        return None

    def dependent_loads(self, iterations: int, units: int) -> int:
        """Return the loads that units wait for, one after the other, to learn their sequence.

        ``iterations``: steps of all searches, counted by the kernel; ``units``: launched.
        """
        return 0
