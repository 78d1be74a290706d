"""The two largest logits of every row, and the token of the largest, for greedy decoding.

A row is divided into parts, which threads search in parallel (``find_candidate``). Afterwards, the
candidates of each row's parts are merged (``merge_candidates``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from labkit.cpu.attention.attention_intrinsics import load_float
from labkit.cpu.runtime.address_intrinsics import struct_at
from labkit.cpu.runtime.jit import inner
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import VECTOR_BYTES, Emitter, emitted

MAX_PARTS = 8  # parts per row
MIN_PART = 4096  # logits per part
SCANNED = 64  # logits that one call of ``_any_above`` compares with a bound
CANDIDATE = np.dtype([("best", np.float64), ("second", np.float64), ("token", np.int64)])
CANDIDATE_BYTES = CANDIDATE.itemsize

candidate_at = struct_at("GreedyCandidate", CANDIDATE)


@emitted(types.boolean, bound=types.float32)
def _any_above(code: Emitter, address: Any, bound: Any) -> Any:
    """Return whether any of the ``SCANNED`` float32 at an address is above ``bound`` or is NaN."""
    build, above, limit, mask = code.builder, None, code.splat(bound), ir.IntType(LANES)
    for vector in range(SCANNED // LANES):
        one = build.fcmp_unordered(">", code.load(address, VECTOR_BYTES * vector), limit)
        above = one if above is None else build.or_(above, one)
    return build.icmp_unsigned("!=", build.bitcast(above, mask), mask(0))


@inner
def num_parts(width: int) -> int:
    """Return the number of parts into which a row of ``width`` logits is divided."""
    return max(1, min(MAX_PARTS, width // MIN_PART))


@inner
def find_candidate(logits: int, width: int, unit: int, candidates: int) -> None:
    """Find the largest and the second-largest logit of one part of a row. A NaN makes both NaN.

    ``logits`` is the address of float32 [rows, width], ``candidates`` the address of an array with
    one ``CANDIDATE`` per unit. ``unit`` is ``row * num_parts(width) + part``.
    """
    parts = num_parts(width)
    part = unit % parts
    first, end = width * part // parts, width * (part + 1) // parts
    row = logits + 4 * (unit // parts) * width
    best, second, token = np.float32(-np.inf), np.float32(-np.inf), first
    while first < end:
        stop = first + SCANNED
        # Most logits are below the second-largest one, so that SCANNED of them are skipped at once.
        if stop > end or _any_above(row + 4 * first, second):
            for i in range(first, min(stop, end)):
                value = load_float(row + 4 * i)
                if value > best:
                    best, second, token = value, best, i
                elif value > second:
                    second = value
                elif value != value:
                    best = second = value
        first = stop
    candidate = candidate_at(candidates + unit * CANDIDATE_BYTES)
    candidate.best, candidate.second, candidate.token = best, second, token


@inner
def merge_candidates(
    candidates: int, width: int, tokens: NDArray[Any], leads: NDArray[Any]
) -> None:
    """Merge the candidates of each row's parts: write its best token and its lead.

    Of tokens with equal logits, the lowest id is the best.
    """
    parts = num_parts(width)
    for row in range(len(tokens)):
        first = candidate_at(candidates + row * parts * CANDIDATE_BYTES)
        best, second, token = first.best, first.second, first.token
        for part in range(row * parts + 1, (row + 1) * parts):
            other = candidate_at(candidates + part * CANDIDATE_BYTES)
            if other.best > best:
                second = max(best, other.second)
                best, token = other.best, other.token
            elif other.best > second:
                second = other.best
            elif other.best != other.best:
                best = second = other.best
        tokens[row], leads[row] = token, np.float32(best) - np.float32(second)
