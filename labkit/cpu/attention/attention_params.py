"""The parameters of an attention launch: a struct that Python fills and the kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from labkit.cpu.precision.kv_dtypes import POOL_DTYPES
from labkit.cpu.precision.pool_elements import MARKER_DTYPES
from labkit.cpu.runtime.address_intrinsics import StructType, address_of
from labkit.cpu.runtime.jit import c_function
from labkit.cpu.simd.simd_emitter import LOG2E

_NO_WINDOW = 1 << 40  # keys: more than any context

# Fields that describe an array are the address of a contiguous array.
_FIELDS = (
    ("q", np.int64),  # float32 [total_q, num_q_heads, head_dim]
    ("k_pool", np.int64),  # [num_blocks, block_size, num_kv_heads, head_dim]
    ("v_pool", np.int64),
    ("out", np.int64),  # same shape as q
    ("sinks", np.int64),  # float32 [num_q_heads]; 0: no sinks
    ("block_tables", np.int64),  # int32 [num_seqs, max_blocks]
    ("max_blocks", np.int64),
    ("num_q_heads", np.int64),
    ("num_kv_heads", np.int64),
    ("group_stride", np.int64),  # query heads per KV head
    ("group", np.int64),  # query heads per KV head that one unit computes: all, or a divisor
    ("kv_heads_per_unit", np.int64),  # KV heads of which one unit computes these query heads
    ("head_dim", np.int64),
    ("block_size", np.int64),
    ("window", np.int64),  # keys
    ("query_scale", np.float32),
    ("softcap", np.float32),  # in base 2; 0: off
    ("window_skip", np.int64),  # 0: keys before the window are read and masked
    ("partitions", np.int64),
    ("partial_sums", np.int64),  # float32 [total_q, num_q_heads, partitions, head_dim]
    ("partial_states", np.int64),  # float32 [total_q, num_q_heads, partitions, 2]
)
# The struct dtypes, by the NumPy dtype of the KV pools. No kernel reads the last field: its type
# tells numba the element type of the pools, so that kernels are compiled separately for each.
PARAMS_DTYPES = {
    dtype: np.dtype([*_FIELDS, ("kv_dtype_marker", MARKER_DTYPES[name])], align=True)
    for name, dtype in POOL_DTYPES.items()
}
(PARAMS_BYTES,) = {dtype.itemsize for dtype in PARAMS_DTYPES.values()}


def params_type(params: np.dtype[Any]) -> StructType:
    """Return the numba type of one of ``PARAMS_DTYPES``."""
    return StructType(f"AttentionParams_{params['kv_dtype_marker']}", params)


def compile_body(function: Any, pool_dtype: np.dtype[Any]) -> int:
    """Compile the arithmetic of a unit (or load it from numba's cache) and return its address.

    ``function`` becomes a C function of int64. Its first parameter points to a struct of
    ``PARAMS_DTYPES``, for pools of this dtype; six others follow. It returns an int64.
    """
    params = types.CPointer(params_type(PARAMS_DTYPES[pool_dtype]))
    return int(c_function(types.int64(params, *[types.int64] * 6))(function).address)


def partials(
    q: NDArray[np.float32], partitions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Allocate the partial results of split-KV's partitions, which ``reduce`` merges.

    They are the sums [total_q, num_q_heads, partitions, head_dim], and the states [..., 2]: running
    maximum (base 2) and softmax sum.
    """
    tokens, heads, head_dim = q.shape
    rows = (tokens, heads, partitions)
    return np.empty((*rows, head_dim), np.float32), np.empty((*rows, 2), np.float32)


def pack(
    kv_dtype: str,
    block_tables: NDArray[np.int32],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    heads_per_unit: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    window_skip: bool,
) -> NDArray[Any]:
    """Return a struct of ``PARAMS_DTYPES`` for a batch, [1].

    The addresses of q, the output, the pools and the sinks are 0. The caller sets them for each
    layer. The struct contains the address of ``block_tables``, so this array must outlive the
    launch. ``heads_per_unit`` counts query heads. ``window`` is a number of keys (None: all).
    ``softcap`` is None if there is none.
    """
    group_stride = num_q_heads // num_kv_heads
    values = {
        "block_tables": address_of(block_tables),
        "max_blocks": block_tables.shape[1],
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "group_stride": group_stride,
        "group": min(heads_per_unit, group_stride),
        "kv_heads_per_unit": max(1, heads_per_unit // group_stride),
        "head_dim": head_dim,
        "block_size": block_size,
        "window": _NO_WINDOW if window is None else window,
        "query_scale": scale * LOG2E,
        "window_skip": window_skip,
        "partitions": 1,
    }
    if softcap is not None:
        values["query_scale"] = scale / softcap
        values["softcap"] = softcap * LOG2E
    packed = np.zeros(1, PARAMS_DTYPES[POOL_DTYPES[kv_dtype]])
    # A single assignment of the tuple takes as long as assigning one field by name.
    packed[0] = tuple(values.get(name, 0) for name in packed.dtype.names or ())
    return packed


def base2(sinks: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return the sinks as logits in base 2, or an empty array for None."""
    if sinks is None:
        return np.zeros(0, np.float32)
    return sinks * np.float32(LOG2E)
