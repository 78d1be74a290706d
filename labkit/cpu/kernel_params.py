"""A launch's operands and options: one record per layer, packed here and read by the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.address_views import StructType, address_of
from labkit.cpu.half_precision import MARKS
from labkit.cpu.kv_dtypes import NUMPY_DTYPES
from labkit.cpu.simd_emitter import FLOAT_BYTES, LOG2E

_NO_WINDOW = 1 << 40  # keys: more than any context

# Arrays by address (bytes), contiguous.
_FIELDS = (
    ("q", np.int64),  # float32 [total_q, num_q_heads, head_dim]
    ("k_pool", np.int64),  # [num_blocks, block_size, num_kv_heads, head_dim]
    ("v_pool", np.int64),
    ("out", np.int64),  # as q
    ("sinks", np.int64),  # float32 [num_q_heads], or 0: none
    ("block_tables", np.int64),  # int32 [num_seqs, max_blocks]
    ("max_blocks", np.int64),
    ("num_q_heads", np.int64),
    ("num_kv_heads", np.int64),
    ("pitch", np.int64),  # query heads from one KV head to the next
    ("group", np.int64),  # how many of them a unit serves
    ("head_dim", np.int64),
    ("block_size", np.int64),
    ("window", np.int64),
    ("query_scale", np.float32),
    ("softcap", np.float32),  # in base 2; 0: off
    ("window_skip", np.int64),  # 0: keys before the window are read and masked
    ("partition", np.int64),  # this unit's share of the keys
    ("partitions", np.int64),
    ("partial_sums", np.int64),  # float32 [total_q, num_q_heads, partitions, head_dim]
    ("partial_states", np.int64),  # float32 [total_q, num_q_heads, partitions, 2]
)
# By what the pools hold. The type of ``element``, a number that nobody reads, says it too, so
# that numba compiles every part of a kernel for the pools that it is given.
PARAMS_DTYPES = {
    stored: np.dtype([*_FIELDS, ("element", MARKS[name])], align=True)
    for name, stored in NUMPY_DTYPES.items()
}
(PARAMS_BYTES,) = {layer.itemsize for layer in PARAMS_DTYPES.values()}


def params_type(layer: np.dtype[Any]) -> StructType:
    """Return the numba type of one of ``PARAMS_DTYPES``."""
    return StructType(f"Layer_{layer['element']}", layer)


class Partials(NamedTuple):
    """What the partitions of split-KV leave: see ``launches.reduce``."""

    sums: NDArray[np.float32]
    states: NDArray[np.float32]


def partials(q: NDArray[np.float32], partitions: int) -> Partials:
    """Return memory for the partitions of every query token and head."""
    tokens, heads, head_dim = q.shape
    rows = (tokens, heads, partitions)
    return Partials(np.empty((*rows, head_dim), np.float32), np.empty((*rows, 2), np.float32))


def pack(
    kv_dtype: str,
    block_tables: NDArray[np.int32],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    window_skip: bool,
) -> NDArray[Any]:
    """Return the parameters of a launch, with 0 for the addresses that differ by layer.

    It holds the address of ``block_tables``, which must outlive the launch. ``window`` and
    ``softcap``: None is off.
    """
    values = {
        "block_tables": address_of(block_tables),
        "max_blocks": block_tables.shape[1],
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "pitch": num_q_heads // num_kv_heads,
        "group": num_q_heads // num_kv_heads,
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
    packed = np.zeros(1, PARAMS_DTYPES[NUMPY_DTYPES[kv_dtype]])
    # All at once: by name each would take as long as all of them.
    packed[0] = tuple(values.get(name, 0) for name in packed.dtype.names or ())
    return packed


def split(layer: NDArray[Any], count: int, partitions: int, parts: Partials | None) -> NDArray[Any]:
    """Return a layer for each unit among which a token's work on a KV head is divided.

    ``count`` members, member ``g`` for query head ``g`` of every KV head, which sees arrays
    that begin there; each of them ``partitions`` times.
    """
    members = np.repeat(np.arange(count), partitions)
    layers = np.repeat(layer, len(members))
    head_bytes = FLOAT_BYTES * int(layer["head_dim"][0])
    layers["group"] //= count
    layers["q"] += members * head_bytes
    layers["out"] += members * head_bytes
    layers["sinks"] += np.where(layers["sinks"] != 0, FLOAT_BYTES * members, 0)
    if parts is not None:
        before = members * partitions
        layers["partition"] = np.tile(np.arange(partitions), count)
        layers["partitions"] = partitions
        layers["partial_sums"] = address_of(parts.sums) + before * head_bytes
        layers["partial_states"] = address_of(parts.states) + before * 2 * FLOAT_BYTES
    return layers


def base2(sinks: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return the sinks as logits in base 2; [0] if there are none."""
    if sinks is None:
        return np.zeros(0, np.float32)
    return sinks * np.float32(LOG2E)
