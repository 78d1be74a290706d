"""The vector registers of the CPU that numba compiles for, and the register tiles that fit them."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cpu.runtime.host_target import host_target

LANES = 16  # float32 elements in a vector of the kernels, the same on every CPU


@dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers of a CPU: ``count`` registers of ``lanes`` float32 elements each.

    Kernels use vectors of ``LANES`` elements. LLVM splits a vector into several registers if they
    are narrower. So every sum has the same order, and every result the same bits, with AVX-512,
    AVX2 and NEON. Only the number of vectors that fit in registers differs.

    ``converts_float16`` is whether the CPU has an instruction that widens float16.
    """

    lanes: int
    count: int
    converts_float16: bool

    def tile_rows(self, vectors: int, max_rows: int) -> int:
        """Return how many rows of ``vectors`` vectors a register tile can have: 1 to ``max_rows``.

        Registers are also needed for one row of operands and one factor.
        """
        free, row = self.count - 1, vectors * LANES // self.lanes
        return max(1, min(max_rows, free // row - 1))

    def tile(self, max_rows: int, max_vectors: int) -> tuple[int, int]:
        """Return the rows and the vectors per row of a register tile.

        The tile has one vector per row if registers are narrower than a vector.
        """
        vectors = max_vectors if self.lanes == LANES else 1
        return self.tile_rows(vectors, max_rows), vectors


AVX512 = Registers(lanes=16, count=32, converts_float16=True)
AVX2 = Registers(lanes=8, count=16, converts_float16=True)
NEON = Registers(lanes=4, count=32, converts_float16=True)
SSE = Registers(lanes=4, count=16, converts_float16=False)


def registers_of(triple: str, features: str) -> Registers:
    """Return the registers of an LLVM target, e.g. ``x86_64-linux-gnu`` with ``+avx2,+fma``."""
    if triple.startswith(("aarch64", "arm64")):
        return NEON
    available = set(features.split(","))
    if "+avx512f" in available:
        return AVX512
    return AVX2 if {"+avx2", "+fma", "+f16c"} <= available else SSE


def _host() -> Registers:
    triple, _, features = host_target()
    return registers_of(triple, features)


HOST_REGISTERS = _host()
