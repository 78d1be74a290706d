"""Padded grid: a unit's index in the grid gives its sequence, at the price of surplus units.

Every sequence gets as many units as the sequence with the longest query needs. The number of units
is ``num_seqs`` times the longest query, in tokens or in Q-blocks. No map is built or searched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.sequence_resolvers.sequence_resolver import Int32Array, Resolver
from labkit.kernel_constants import BQ


class PaddedGridLookup(NamedTuple):
    """The lookup: the number of units per sequence, in tokens and in Q-blocks."""

    tokens: int
    qblocks: int


class PaddedGridResolver(Resolver):
    """Sizes the grid by the longest query."""

    variant = "padded_grid"
    lookup_type = PaddedGridLookup

    def lookup(
        self, cu_seqlens_q: Int32Array, seq_lens: Int32Array
    ) -> tuple[PaddedGridLookup, float]:
        longest = int(np.diff(cu_seqlens_q).max(initial=0))
        return PaddedGridLookup(longest, -(-longest // BQ)), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Divide the unit's index by the number of tokens of the longest query.

        The quotient is the sequence, the remainder the token in it. A token past the end of its
        sequence is surplus.
        """
        sequence, row = unit // lookup.tokens, unit % lookup.tokens
        token = cu[sequence] + row
        return (sequence if token < cu[sequence + 1] else -1), token, 0

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        """Divide the unit's index by the number of Q-blocks of the longest query.

        The quotient is the sequence, the remainder the Q-block in it. The kernel itself detects a
        surplus Q-block.
        """
        return unit // lookup.qblocks, unit % lookup.qblocks * BQ, 0

    @staticmethod
    def token_units(lookup: Any, cu: Any) -> int:
        return lookup.tokens * (len(cu) - 1)  # type: ignore[no-any-return]

    @staticmethod
    def qblock_units(lookup: Any, cu: Any) -> int:
        return lookup.qblocks * (len(cu) - 1)  # type: ignore[no-any-return]

    def grid_axes(self, lookup: Any, tiled: bool, cu: Int32Array) -> tuple[int, ...]:
        return (lookup.qblocks if tiled else lookup.tokens, len(cu) - 1)
