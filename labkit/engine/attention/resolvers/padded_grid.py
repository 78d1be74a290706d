"""Padded grid: the grid itself names the sequence, at the price of surplus units.

Every sequence gets as many units as the longest one needs: ``num_seqs`` x the longest
query in tokens, or in Q-blocks. Nothing is searched and nothing is built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PaddedGrid(NamedTuple):
    """The lookup: sizes of the grid, in units per sequence."""

    tokens: int
    qblocks: int
    cu_seqlens_q: NDArray[np.int32]

    def sequence_of_tokens(self, total_q: int) -> NDArray[np.int64]:
        """Return the owner of every token."""
        return np.searchsorted(self.cu_seqlens_q, np.arange(total_q), side="right") - 1


class PaddedGridResolver:
    """Sizes the grid by the longest query."""

    name = "padded_grid"

    def lookup(
        self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], bq: int
    ) -> tuple[PaddedGrid, float]:
        """Return the lookup; no map is built, so its time is 0 us."""
        longest = int(np.diff(cu_seqlens_q).max(initial=0))
        return PaddedGrid(longest, -(-longest // bq), cu_seqlens_q), 0.0
