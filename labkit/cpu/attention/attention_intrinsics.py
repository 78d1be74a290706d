"""Intrinsics of the attention kernels: softmax of a tile of scores, and operations on rows.

Addresses are int64 (``array.ctypes.data``), strides are in bytes, elements are float32. A parameter
``vectors`` is a number of vectors of ``LANES`` elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from labkit.cpu.precision.half_precision import BFLOAT16, FLOAT16, FLOAT32, ElementType
from labkit.cpu.precision.kv_dtypes import KV_GROUP
from labkit.cpu.precision.pool_elements import INT4, INT8, QuantizedType, element_type
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import (
    F32,
    I32,
    I32_VECTOR,
    I64,
    POINTER,
    VECTOR_BYTES,
    Emitter,
    emitted,
)

TILE_KEYS = 64  # keys in a tile; all kernels rescale their online softmax once per tile


@emitted(types.float32)
def softmax_tile(code: Emitter, scores: Any, low: Any, high: Any, state: Any) -> Any:
    """Update a row's online softmax with a tile of base-2 logits, and return the rescaling factor.

    The caller must multiply the row's earlier sums by this factor. ``scores`` is the address of
    ``TILE_KEYS`` logits, which are replaced by weights. At least one key must be inside ``low`` to
    ``high`` (exclusive). The others get the weight 2**-126, too small to change the sum; the caller
    must not add their values. ``state`` is the address of the running maximum and sum.
    """
    build = code.builder
    low, high = (code.splat(build.trunc(bound, I32)) for bound in (low, high))
    masked = code.constant(float("-inf"))
    tiles = []
    for v in range(TILE_KEYS // LANES):
        lanes = ir.Constant(I32_VECTOR, [v * LANES + lane for lane in range(LANES)])
        inside = build.and_(
            build.icmp_signed(">=", lanes, low), build.icmp_signed("<", lanes, high)
        )
        tiles.append(build.select(inside, code.load(scores, VECTOR_BYTES * v), masked))
    before = code.splat(code.load(state, kind=F32))
    largest = code.maximum(before, code.reduce_lanes(_tree(tiles, code.maximum), code.maximum))
    shrink = code.first_lane(code.exp2(build.fsub(before, largest)))
    weights = [code.exp2(build.fsub(tile, largest)) for tile in tiles]
    for v, weight in enumerate(weights):
        code.store(weight, scores, VECTOR_BYTES * v)
    total = code.first_lane(code.reduce_lanes(_tree(weights, build.fadd), build.fadd))
    scaled = build.fmul(code.load(state, 4, F32), shrink)
    code.store(code.first_lane(largest), state)
    code.store(build.fadd(scaled, total), state, 4)
    return shrink


@emitted(cap=types.float32)
def softcap_tile(code: Emitter, scores: Any, cap: Any) -> None:
    """Replace the ``TILE_KEYS`` scores at address ``scores`` by ``cap * tanh(score)``."""
    factor = code.splat(cap)
    for v in range(TILE_KEYS // LANES):
        value = code.builder.fmul(factor, code.tanh(code.load(scores, VECTOR_BYTES * v)))
        code.store(value, scores, VECTOR_BYTES * v)


@emitted(types.float32, x=types.float32)
def exp2_scalar(code: Emitter, x: Any) -> Any:
    """Return ``2**x`` for ``x <= 0``, with the same bits as the powers in ``softmax_tile``."""
    return code.first_lane(code.exp2(code.splat(x)))


@emitted(factor=types.float32)
def scale_row(code: Emitter, target: Any, source: Any, vectors: Any, factor: Any) -> None:
    """Write ``factor`` times the ``vectors`` vectors of ``source`` to ``target``."""
    factors = code.splat(factor)

    def scale(index: Any) -> None:
        value = code.builder.fmul(factors, code.load(code.offset(source, index, VECTOR_BYTES)))
        code.store(value, code.offset(target, index, VECTOR_BYTES))

    code.for_each(vectors, scale)


@emitted()
def copy_bytes(code: Emitter, target: Any, source: Any, count: Any) -> None:
    """Copy ``count`` bytes."""
    pointers = (code.builder.inttoptr(address, POINTER) for address in (target, source))
    cgutils.raw_memcpy(code.builder, *pointers, count, 1)


@emitted(types.int64, params=None)
def pool_row_bytes(code: Emitter, params: Any, head_dim: Any) -> Any:
    """Return the bytes of one head's key or value in the KV pools."""
    element, build = element_type(params), code.builder
    if isinstance(element, QuantizedType):
        groups = build.udiv(head_dim, I64(KV_GROUP))
        return build.mul(groups, I64(element.block_bytes))
    return build.mul(head_dim, I64(element.bytes))


@emitted(params=None)
def copy_widened(code: Emitter, params: Any, target: Any, source: Any, vectors: Any) -> None:
    """Copy ``vectors`` vectors from a row of a KV pool, widened to float32.

    ``source`` is the address of the row. The type of ``params`` selects the pool's element type.
    """
    element, build = element_type(params), code.builder
    if element is FLOAT32:
        pointers = (build.inttoptr(address, POINTER) for address in (target, source))
        cgutils.raw_memcpy(build, *pointers, build.mul(vectors, I64(VECTOR_BYTES)), 1)
        return

    def widen(block: Any) -> None:
        for v in range(element.block_vectors):
            wide = element.load_vector(code, source, block, v)
            place = code.offset(target, block, VECTOR_BYTES * element.block_vectors)
            code.store(wide, place, VECTOR_BYTES * v)

    code.for_each(code.blocks(vectors, element.block_vectors), widen)


def _round_row(element: ElementType) -> Any:
    """Return an intrinsic that copies vectors of float32, rounded to ``element``."""

    @emitted()
    def round_row(code: Emitter, target: Any, source: Any, vectors: Any) -> None:
        def round_vector(index: Any) -> None:
            value = code.load(code.offset(source, index, VECTOR_BYTES))
            element.store(code, value, code.offset(target, index, element.vector_bytes))

        code.for_each(vectors, round_vector)

    return round_row


def _quantize_row(element: QuantizedType) -> Any:
    """Return an intrinsic that quantises groups of float32 to ``element``."""

    @emitted()
    def quantize_row(code: Emitter, target: Any, source: Any, groups: Any) -> None:
        def quantize(group: Any) -> None:
            numbers = code.offset(source, group, VECTOR_BYTES * element.block_vectors)
            element.store(code, numbers, target, group)

        code.for_each(groups, quantize)

    return quantize_row


round_to_float16, round_to_bfloat16 = _round_row(FLOAT16), _round_row(BFLOAT16)
quantize_to_int8, quantize_to_int4 = _quantize_row(INT8), _quantize_row(INT4)


@emitted()
def clear_row(code: Emitter, target: Any, vectors: Any) -> None:
    """Write ``vectors`` vectors of zeros to address ``target``."""
    zeros = code.constant(0.0)
    code.for_each(
        vectors, lambda index: code.store(zeros, code.offset(target, index, VECTOR_BYTES))
    )


def _load(kind: Any, numba_kind: Any) -> Any:
    """Return an intrinsic that loads a scalar from an address."""
    return emitted(numba_kind)(lambda code, address: code.load(address, kind=kind))


def _store(numba_kind: Any) -> Any:
    """Return an intrinsic that stores a scalar at an address."""
    return emitted(value=numba_kind)(lambda code, address, value: code.store(value, address))


load_float, load_int32 = _load(F32, types.float32), _load(I32, types.int32)
store_float, store_int64 = _store(types.float32), _store(types.int64)


@emitted(types.int64)
def take_ticket(code: Emitter, counter: Any) -> Any:
    """Add one to the int64 at address ``counter``, and return its old value, atomically."""
    pointer = code.builder.inttoptr(counter, POINTER)
    return code.builder.atomic_rmw("add", pointer, I64(1), "monotonic")


def _tree(values: list[Any], combine: Any) -> Any:
    """Combine neighbouring values by ``combine``, pair by pair, until one is left; return it."""
    while len(values) > 1:
        pairs = range(0, len(values) - 1, 2)
        odd = values[len(values) - len(values) % 2 :]
        values = [combine(values[i], values[i + 1]) for i in pairs] + odd
    return values[0]


@emitted(types.int64)
def call_body(
    code: Emitter, body: Any, params: Any, memory: Any, a: Any, b: Any, c: Any, d: Any, e: Any
) -> Any:
    """Call the C function at address ``body`` with the other seven arguments, all int64.

    Returns the int64 that the function returns.
    """
    kind = ir.FunctionType(I64, [I64] * 7)
    pointer = code.builder.inttoptr(body, kind.as_pointer())
    return code.builder.call(pointer, [params, memory, a, b, c, d, e])
