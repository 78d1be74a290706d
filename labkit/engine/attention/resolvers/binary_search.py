"""Binary search over ``cu_seqlens_q`` inside the kernel: nothing is built on the host.

Source: "One Launch for Any Batch: The Binary Search Inside vllm-metal's Varlen Attention"
(2026-06-12). The owner of token ``t`` is the largest ``i`` with ``cu[i] <= t``; the owner
of Q-block ``b`` the largest ``i`` with ``cu[i] // BQ + i <= b``: every sequence has
``len // BQ`` full blocks and at most one ragged one, which ``+ i`` counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BinarySearch(NamedTuple):
    """The lookup: ``cu_seqlens_q`` int32 [num_seqs + 1] itself."""

    cu_seqlens_q: NDArray[np.int32]

    def sequence_of_tokens(self, total_q: int) -> NDArray[np.int64]:
        """Return the owner of every token, as the search finds it."""
        return np.searchsorted(self.cu_seqlens_q, np.arange(total_q), side="right") - 1


class BinarySearchResolver:
    """Hands the prefix sums to the kernel, which searches them."""

    name = "binary_search"

    def lookup(
        self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], bq: int
    ) -> tuple[BinarySearch, float]:
        """Return the lookup; no map is built, so its time is 0 us."""
        return BinarySearch(cu_seqlens_q), 0.0
