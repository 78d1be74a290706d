"""The vector registers of the CPU that numba compiles for, and how much of a product they hold."""

from __future__ import annotations

from dataclasses import dataclass

from numba.core.registry import cpu_target

LANES = 16  # float32 of a vector, on every CPU


@dataclass(frozen=True, slots=True)
class Registers:
    """``count`` registers of ``lanes`` float32 each.

    Kernels are written in vectors of ``LANES`` numbers. Narrower registers hold a vector in parts,
    which is LLVM's business: every sum has the same order with AVX-512, AVX2 and NEON, and every
    result the same bits. What differs is how many vectors fit.

    ``converts_float16``: whether an instruction widens float16.
    """

    lanes: int
    count: int
    converts_float16: bool

    def rows(self, vectors: int, most: int) -> int:
        """Return how many rows of sums, so many vectors each, fit at once, at least one.

        Beside them lie one row of what is multiplied and one factor.
        """
        free, row = self.count - 1, vectors * LANES // self.lanes
        return max(1, min(most, free // row - 1))

    def tile(self, rows: int, vectors: int) -> tuple[int, int]:
        """Return rows and vectors of a register tile, at most these; in parts one vector."""
        width = vectors if self.lanes == LANES else 1
        return self.rows(width, rows), width


AVX512 = Registers(lanes=16, count=32, converts_float16=True)
AVX2 = Registers(lanes=8, count=16, converts_float16=True)
NEON = Registers(lanes=4, count=32, converts_float16=True)
SSE = Registers(lanes=4, count=16, converts_float16=False)


def registers_of(triple: str, features: str) -> Registers:
    """Return the registers of a target in LLVM's words: ``x86_64-linux-gnu``, ``+avx2,+fma``."""
    if triple.startswith(("aarch64", "arm64")):
        return NEON
    have = set(features.split(","))
    if "+avx512f" in have:
        return AVX512
    return AVX2 if {"+avx2", "+fma", "+f16c"} <= have else SSE


def _host() -> Registers:
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return registers_of(triple, features)


HOST_REGISTERS = _host()
