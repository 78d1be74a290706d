"""Binary search over ``cu_seqlens_q`` inside the kernel: nothing is built on the host.

Source: "One Launch for Any Batch: The Binary Search Inside vllm-metal's Varlen Attention"
(2026-06-12). The sequence of token ``t`` is the largest ``i`` with ``cu[i] <= t``. The sequence of
Q-block ``b`` is the largest ``i`` with ``cu[i] // BQ + i <= b``: every sequence has ``len // BQ``
full blocks and at most one partial block, which ``+ i`` counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from labkit.engine.attention.sequence_resolvers.sequence_resolver import Int32Array, Resolver
from labkit.kernel_constants import BQ


class BinarySearchLookup(NamedTuple):
    """The lookup: ``cu_seqlens_q`` int32 [num_seqs + 1] itself."""

    cu_seqlens_q: Int32Array


class BinarySearchResolver(Resolver):
    """Passes the prefix sums to the kernel, which searches them."""

    variant = "binary_search"
    lookup_type = BinarySearchLookup

    def lookup(
        self, cu_seqlens_q: Int32Array, seq_lens: Int32Array
    ) -> tuple[BinarySearchLookup, float]:
        return BinarySearchLookup(cu_seqlens_q), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        prefix = lookup.cu_seqlens_q
        low, high, steps = 0, len(prefix) - 1, 0
        while low < high:
            middle = (low + high + 1) // 2
            steps += 1
            if prefix[middle] <= unit:
                low = middle
            else:
                high = middle - 1
        return low, unit, steps

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        prefix = lookup.cu_seqlens_q
        low, high, steps = 0, len(prefix) - 1, 0
        while low < high:
            middle = (low + high + 1) // 2
            steps += 1
            if prefix[middle] // BQ + middle <= unit:
                low = middle
            else:
                high = middle - 1
        return low, (unit - (cu[low] // BQ + low)) * BQ, steps

    def dependent_loads(self, iterations: int, units: int) -> int:
        return iterations
