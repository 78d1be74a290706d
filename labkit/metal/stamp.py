"""The uint32 that a kernel writes to show which kernel of which launch it was.

As in ``kernels/common.metal``; the CPU's kernels write the same.
"""

from __future__ import annotations

KERNEL_IDS = {"decode": 1, "tiled": 2, "reference": 3, "reduce": 4}
STAMP_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
STAMP_MASK = 0xFFFFFFFF


def launch_stamp(nonce: int, kernel_id: int, resolver_id: int) -> int:
    """Return the uint32 that a kernel of this kind writes for the launch ``nonce``."""
    parts = zip((nonce, kernel_id, resolver_id), STAMP_FACTORS, strict=True)
    return sum(value * factor for value, factor in parts) & STAMP_MASK
