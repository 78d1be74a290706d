"""Computes the operations of a captured graph, except attention.

A node's work is divided into units, which threads take from a shared counter. A unit calls the same
functions as the operation's own kernel outside a graph, so the results are identical to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.cpu.attention.kernel_entry_points import KVWrite, write_token_kv
from labkit.cpu.capture import graph_ops
from labkit.cpu.layers import activations, norms, rope
from labkit.cpu.layers.activations import activate
from labkit.cpu.layers.norms import rms_row
from labkit.cpu.layers.rope import rotate_row
from labkit.cpu.layers.top_two_logits import find_candidate, num_parts
from labkit.cpu.matmul import matmul_launch
from labkit.cpu.matmul.matmul_launch import params_at, share
from labkit.cpu.replay.graph_attention_structs import LAUNCH_BYTES, launch_at
from labkit.cpu.runtime.address_intrinsics import float_array, int32_array, int64_array
from labkit.cpu.runtime.jit import inner
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES

ELEMENTWISE_CHUNK = 4 * activations.CHUNK  # elements per unit of ADD, MULTIPLY and SCALE

embedding_at = params_at(graph_ops.EMBEDDING, "Embedding")
rms_norm_at = params_at(graph_ops.RMS_NORM, "RMSNorm")
rope_at = params_at(graph_ops.ROPE, "RoPE")
activation_at = params_at(graph_ops.ACTIVATION, "Activation")
elementwise_at = params_at(graph_ops.ADD, "Elementwise")
scale_at = params_at(graph_ops.SCALE, "Scale")
store_kv_at = params_at(graph_ops.STORE_KV, "StoreKV")
attention_at = params_at(graph_ops.ATTENTION, "Attention")
greedy_at = params_at(graph_ops.GREEDY, "Greedy")


@inner
def num_units(op: int, params: int, rows: int, workers: int) -> int:
    """Return the number of units into which a node's work is divided.

    This is 1 if handing work to other threads would take longer than the work itself. ``params``
    is the address of the node's parameters, ``rows`` the number of rows of the step.
    """
    units = rows
    if op == graph_ops.ATTENTION:
        units = workers
    elif op == graph_ops.ACTIVATION:
        size, chunk = activation_at(params).size, activations.CHUNK
        units = 1 if size < activations.MIN_PARALLEL_NUMBERS else (size + chunk - 1) // chunk
    elif op in (graph_ops.ADD, graph_ops.MULTIPLY):
        units = (elementwise_at(params).size + ELEMENTWISE_CHUNK - 1) // ELEMENTWISE_CHUNK
    elif op == graph_ops.SCALE:
        units = (scale_at(params).size + ELEMENTWISE_CHUNK - 1) // ELEMENTWISE_CHUNK
    elif op == graph_ops.RMS_NORM:
        norm = rms_norm_at(params)
        units = 1 if norm.num_rows * norm.width < norms.MIN_PARALLEL_NUMBERS else rows
    elif op == graph_ops.GREEDY:
        units = rows * num_parts(greedy_at(params).vocabulary)
    elif op == graph_ops.ROPE:
        rotation = rope_at(params)
        size = rows * rotation.heads * rotation.width
        units = 1 if size < rope.MIN_PARALLEL_NUMBERS else rows
    elif op not in (graph_ops.EMBEDDING, graph_ops.STORE_KV):
        units = matmul_launch.num_units(op, params, rows, workers)
    return units


# These compute the rows or elements from ``first`` to ``end``.
@inner
def _embed(table: Any, first: int, end: int) -> None:
    for row in range(first, end):
        token = int(int32_array(table.token_ids, end)[row])
        source = float_array(table.weights + 4 * token * table.width, table.width)
        out = float_array(table.out + 4 * row * table.width, table.width)
        for i in range(table.width):
            out[i] = source[i]


@inner
def _rotate(rotation: Any, first: int, end: int) -> None:
    heads, width, half = rotation.heads, rotation.width, rotation.half
    positions = int32_array(rotation.positions, end)
    for token in range(first, end):
        at = FLOAT_BYTES * half * positions[token]
        for head in range(heads):
            row = FLOAT_BYTES * width * (token * heads + head)
            rotate_row(
                rotation.x + row, rotation.out + row, rotation.cos + at, rotation.sin + at, half,
                width, np.float32(rotation.input_scale), rotation.traditional,
            )  # fmt: skip


@inner
def _activate(activation: Any, first: int, end: int) -> None:
    size, offset = end - first, 4 * first
    x, gate = float_array(activation.x + offset, size), float_array(activation.gate + offset, size)
    activate(activation.kind, x, gate, float_array(activation.out + offset, size))


@inner
def _elementwise(op: int, operands: Any, first: int, end: int) -> None:
    size, offset = end - first, 4 * first
    a, b = float_array(operands.a + offset, size), float_array(operands.b + offset, size)
    out = float_array(operands.out + offset, size)
    if op == graph_ops.ADD:
        for i in range(size):
            out[i] = a[i] + b[i]
    else:
        for i in range(size):
            out[i] = a[i] * b[i]


@inner
def _scale(operands: Any, first: int, end: int) -> None:
    size, offset, factor = end - first, 4 * first, np.float32(operands.factor)
    a, out = float_array(operands.a + offset, size), float_array(operands.out + offset, size)
    for i in range(size):
        out[i] = a[i] * factor


@inner
def _normalize(norm: Any, first: int, end: int) -> None:
    width, weights = norm.width, float_array(norm.weights, norm.width)
    for row in range(first, end):
        offset = 4 * row * width
        x, out = float_array(norm.x + offset, width), float_array(norm.out + offset, width)
        rms_row(x, weights, norm.eps, out)


@inner
def _store_kv(store: Any, launches: int, slots: int, first: int, end: int) -> None:
    """Write the keys and values of the rows from ``first`` to ``end`` to the KV pools."""
    launch = launch_at(launches + store.launch * LAUNCH_BYTES)
    write = KVWrite(
        launch.pool_dtype, store.k, store.v, launch.k_pool, launch.v_pool,
        int64_array(slots, end), launch.token_numbers,
    )  # fmt: skip
    for token in range(first, end):
        write_token_kv(write, token)


def _unit(op, params, unit, units, rows, launches, slots):  # type: ignore[no-untyped-def]
    """Compute one unit of a node. ``matmul_launch.compile_unit`` describes the arguments."""
    if op in (graph_ops.ADD, graph_ops.MULTIPLY):
        first, end = share(unit, units, elementwise_at(params).size)
        _elementwise(op, elementwise_at(params), first, end)
    elif op == graph_ops.SCALE:
        first, end = share(unit, units, scale_at(params).size)
        _scale(scale_at(params), first, end)
    elif op == graph_ops.ACTIVATION:
        first, end = share(unit, units, activation_at(params).size)
        _activate(activation_at(params), first, end)
    elif op == graph_ops.RMS_NORM:
        first, end = share(unit, units, rms_norm_at(params).num_rows)
        _normalize(rms_norm_at(params), first, end)
    elif op == graph_ops.GREEDY:
        greedy = greedy_at(params)
        find_candidate(greedy.logits, greedy.vocabulary, unit, greedy.out)
    else:
        first, end = share(unit, units, rows)
        if op == graph_ops.ROPE:
            _rotate(rope_at(params), first, end)
        elif op == graph_ops.STORE_KV:
            _store_kv(store_kv_at(params), launches, slots, first, end)
        else:
            _embed(embedding_at(params), first, end)


def unit_address(op: int) -> int:
    """Return the address of an operation's unit function, or 0 for an attention launch.

    The function is compiled when it is first needed.
    """
    if op == graph_ops.ATTENTION:
        return 0
    product = matmul_launch.unit_address(op)
    return matmul_launch.compile_unit(_unit) if product is None else product
