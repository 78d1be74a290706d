"""How many numbers of a matrix product fit the registers of this CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """The part of a product that a kernel keeps in registers: ``rows`` x ``columns``.

    A column vector is ``vectors`` registers of ``lanes`` float32.
    """

    lanes: int
    vectors: int
    rows: int

    @property
    def columns(self) -> int:
        """Columns of a tile, which is also the width of a weight panel."""
        return self.lanes * self.vectors


def register_tile() -> RegisterTile:
    """Return the tile for the host: accumulators must fit beside one row of weights.

    AVX-512 has 32 registers of 16 lanes, NEON 32 of 4, AVX2 16 of 8, SSE 16 of 4.
    """
    if platform.machine().lower() in ("arm64", "aarch64"):
        return RegisterTile(lanes=4, vectors=4, rows=6)
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return RegisterTile(lanes=16, vectors=2, rows=8)
    if features.get("avx2"):
        return RegisterTile(lanes=8, vectors=2, rows=6)
    return RegisterTile(lanes=4, vectors=2, rows=4)
