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
from labkit.cpu.precision.pool_elements import element_type
from labkit.cpu.precision.quantized_kv_registers import INT4, INT8, QuantizedType
from labkit.cpu.runtime.jit import intrinsic
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import F32, I32, I32_VECTOR, I64, POINTER, VECTOR_BYTES, Emitter

TILE_KEYS = 64  # keys in a tile; all kernels rescale their online softmax once per tile


@intrinsic
def softmax_tile(typing_context: Any, scores: Any, low: Any, high: Any, state: Any) -> Any:
    """Update a row's online softmax with a tile of base-2 logits, and return the rescaling factor.

    The caller must multiply the row's earlier sums by this factor. ``scores`` is the address of
    ``TILE_KEYS`` logits, which are replaced by weights. At least one key must be inside ``low`` to
    ``high`` (exclusive). The others get the weight 2**-126, too small to change the sum; the caller
    must not add their values. ``state`` is the address of the running maximum and sum.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        scores, low, high, state = arguments
        low, high = (code.splat(builder.trunc(bound, I32)) for bound in (low, high))
        masked = code.constant(float("-inf"))
        tiles = []
        for v in range(TILE_KEYS // LANES):
            lanes = ir.Constant(I32_VECTOR, [v * LANES + lane for lane in range(LANES)])
            inside = builder.and_(
                builder.icmp_signed(">=", lanes, low),
                builder.icmp_signed("<", lanes, high),
            )
            tiles.append(builder.select(inside, code.load(scores, VECTOR_BYTES * v), masked))
        before = code.splat(code.load(state, kind=F32))
        largest = code.maximum(before, code.reduce_lanes(_tree(tiles, code.maximum), code.maximum))
        shrink = code.first_lane(code.exp2(builder.fsub(before, largest)))
        weights = [code.exp2(builder.fsub(tile, largest)) for tile in tiles]
        for v, weight in enumerate(weights):
            code.store(weight, scores, VECTOR_BYTES * v)
        total = code.first_lane(code.reduce_lanes(_tree(weights, builder.fadd), builder.fadd))
        scaled = builder.fmul(code.load(state, 4, F32), shrink)
        code.store(code.first_lane(largest), state)
        code.store(builder.fadd(scaled, total), state, 4)
        return shrink

    return types.float32(*[types.int64] * 4), emit


@intrinsic
def softcap_tile(typing_context: Any, scores: Any, cap: Any) -> Any:
    """Replace the ``TILE_KEYS`` scores at address ``scores`` by ``cap * tanh(score)``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        scores, cap = arguments
        factor = code.splat(cap)
        for v in range(TILE_KEYS // LANES):
            value = builder.fmul(factor, code.tanh(code.load(scores, VECTOR_BYTES * v)))
            code.store(value, scores, VECTOR_BYTES * v)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def exp2_scalar(typing_context: Any, x: Any) -> Any:
    """Return ``2**x`` for ``x <= 0``, with the same bits as the powers in ``softmax_tile``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        return code.first_lane(code.exp2(code.splat(arguments[0])))

    return types.float32(types.float32), emit


@intrinsic
def scale_row(typing_context: Any, target: Any, source: Any, vectors: Any, factor: Any) -> Any:
    """Write ``factor`` times the ``vectors`` vectors of ``source`` to ``target``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        target, source, vectors, factor = arguments
        factors = code.splat(factor)

        def scale(index: Any) -> None:
            value = builder.fmul(factors, code.load(code.offset(source, index, VECTOR_BYTES)))
            code.store(value, code.offset(target, index, VECTOR_BYTES))

        code.for_each(vectors, scale)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, count = arguments
        pointers = (builder.inttoptr(address, POINTER) for address in (target, source))
        cgutils.raw_memcpy(builder, *pointers, count, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def pool_row_bytes(typing_context: Any, params: Any, head_dim: Any) -> Any:
    """Return the bytes of one head's key or value in the KV pools."""
    element = element_type(params)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        head_dim = arguments[1]
        if isinstance(element, QuantizedType):
            groups = builder.udiv(head_dim, I64(KV_GROUP))
            return builder.mul(groups, I64(element.block_bytes))
        return builder.mul(head_dim, I64(element.bytes))

    return types.int64(params, types.int64), emit


@intrinsic
def copy_widened(typing_context: Any, params: Any, target: Any, source: Any, vectors: Any) -> Any:
    """Copy ``vectors`` vectors from a row of a KV pool, widened to float32.

    ``source`` is the address of the row. The type of ``params`` selects the pool's element type.
    """
    element = element_type(params)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, target, source, vectors = arguments
        if element is FLOAT32:
            pointers = (builder.inttoptr(address, POINTER) for address in (target, source))
            cgutils.raw_memcpy(builder, *pointers, builder.mul(vectors, I64(VECTOR_BYTES)), 1)
            return context.get_dummy_value()
        code = Emitter(builder)

        def widen(block: Any) -> None:
            for v in range(element.block_vectors):
                wide = element.load_vector(code, source, block, v)
                place = code.offset(target, block, VECTOR_BYTES * element.block_vectors)
                code.store(wide, place, VECTOR_BYTES * v)

        code.for_each(code.blocks(vectors, element.block_vectors), widen)
        return context.get_dummy_value()

    return types.void(params, *[types.int64] * 3), emit


def _round_row(element: ElementType) -> Any:
    """Return an intrinsic that copies vectors of float32, rounded to ``element``."""

    @intrinsic
    def round_row(typing_context: Any, target: Any, source: Any, vectors: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            target, source, vectors = arguments

            def round_vector(index: Any) -> None:
                value = code.load(code.offset(source, index, VECTOR_BYTES))
                element.store(code, value, code.offset(target, index, element.vector_bytes))

            code.for_each(vectors, round_vector)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return round_row


def _quantize_row(element: QuantizedType) -> Any:
    """Return an intrinsic that quantises groups of float32 to ``element``."""

    @intrinsic
    def quantize_row(typing_context: Any, target: Any, source: Any, groups: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            target, source, groups = arguments

            def quantize(group: Any) -> None:
                numbers = code.offset(source, group, VECTOR_BYTES * element.block_vectors)
                element.store(code, numbers, target, group)

            code.for_each(groups, quantize)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return quantize_row


round_to_float16, round_to_bfloat16 = _round_row(FLOAT16), _round_row(BFLOAT16)
quantize_to_int8, quantize_to_int4 = _quantize_row(INT8), _quantize_row(INT4)


@intrinsic
def clear_row(typing_context: Any, target: Any, vectors: Any) -> Any:
    """Write ``vectors`` vectors of zeros to address ``target``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        zeros = code.constant(0.0)
        target, vectors = arguments
        code.for_each(
            vectors, lambda index: code.store(zeros, code.offset(target, index, VECTOR_BYTES))
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), emit


def _load_and_store(kind: Any, numba_kind: Any) -> tuple[Any, Any]:
    """Return two intrinsics, which load and store one scalar at an address."""

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return Emitter(builder).load(arguments[0], kind=kind)

        return numba_kind(types.int64), emit

    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            Emitter(builder).store(arguments[1], arguments[0])
            return context.get_dummy_value()

        return types.void(types.int64, numba_kind), emit

    return load, store


load_float, store_float = _load_and_store(F32, types.float32)
load_int32, _ = _load_and_store(I32, types.int32)
_, store_int64 = _load_and_store(I64, types.int64)


@intrinsic
def take_ticket(typing_context: Any, counter: Any) -> Any:
    """Add one to the int64 at address ``counter``, and return its old value, atomically."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], POINTER)
        return builder.atomic_rmw("add", pointer, I64(1), "monotonic")

    return types.int64(types.int64), emit


def _tree(values: list[Any], combine: Any) -> Any:
    """Combine neighbouring values by ``combine``, pair by pair, until one is left; return it."""
    while len(values) > 1:
        pairs = range(0, len(values) - 1, 2)
        odd = values[len(values) - len(values) % 2 :]
        values = [combine(values[i], values[i + 1]) for i in pairs] + odd
    return values[0]


@intrinsic
def call_body(
    typing_context: Any, body: Any, params: Any, memory: Any, a: Any, b: Any, c: Any, d: Any, e: Any
) -> Any:
    """Call the C function at address ``body`` with the other seven arguments, all int64.

    Returns the int64 that the function returns.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 7)
        pointer = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.int64(*[types.int64] * 8), emit
