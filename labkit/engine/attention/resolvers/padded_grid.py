"""Padded grid: the grid itself names the sequence, at the price of surplus units.

Every sequence gets as many units as the longest one needs: ``num_seqs`` x the longest
query in tokens, or in Q-blocks. Nothing is searched and nothing is built.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.resolvers.resolver import Ints, Resolver
from labkit.kernel_abi import BQ


class PaddedGridLookup(NamedTuple):
    """The lookup: sizes of the grid, in units per sequence."""

    tokens: int
    qblocks: int


class PaddedGridResolver(Resolver):
    """Sizes the grid by the longest query."""

    variant = "padded_grid"
    lookup_type = PaddedGridLookup

    def lookup(self, cu_seqlens_q: Ints, seq_lens: Ints) -> tuple[PaddedGridLookup, float]:
        """Return the lookup; no map is built."""
        longest = int(np.diff(cu_seqlens_q).max(initial=0))
        return PaddedGridLookup(longest, -(-longest // BQ)), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Divide by the tokens of the longest sequence; past the end of its own: surplus."""
        sequence, row = unit // lookup.tokens, unit % lookup.tokens
        token = cu[sequence] + row
        return (sequence if token < cu[sequence + 1] else -1), token, 0

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        """Divide by the Q-blocks of the longest sequence; the kernel sees what is surplus."""
        return unit // lookup.qblocks, unit % lookup.qblocks * BQ, 0

    @staticmethod
    def token_units(lookup: Any, cu: Any) -> int:
        """Return the longest sequence's tokens for each sequence."""
        return lookup.tokens * (len(cu) - 1)  # type: ignore[no-any-return]

    @staticmethod
    def qblock_units(lookup: Any, cu: Any) -> int:
        """Return the longest sequence's Q-blocks for each sequence."""
        return lookup.qblocks * (len(cu) - 1)  # type: ignore[no-any-return]

    def grid_axes(self, lookup: Any, tiled: bool, cu: Ints) -> tuple[int, ...]:
        """Return units per sequence, and sequences."""
        return (lookup.qblocks if tiled else lookup.tokens, len(cu) - 1)
