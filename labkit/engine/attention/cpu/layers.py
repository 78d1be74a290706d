"""One launch's operands and options, packed as the kernels read them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.cpu.dispatch import Dispatch
from labkit.engine.attention.cpu.rows import LAYERS
from labkit.engine.attention.metadata import AttentionMetadata

_NO_WINDOW = 1 << 40  # keys: more than any context
_LOG2E = math.log2(math.e)


class Partials(NamedTuple):
    """What the partitions of split-KV leave: see ``kernels.reduce``."""

    sums: NDArray[np.float32]
    states: NDArray[np.float32]


def partials(q: NDArray[np.float32], partitions: int) -> Partials:
    """Return memory for the partitions of every query token and head."""
    tokens, heads, head_dim = q.shape
    rows = (tokens, heads, partitions)
    return Partials(np.empty((*rows, head_dim), np.float32), np.empty((*rows, 2), np.float32))


def pack(
    q: NDArray[np.float32],
    k_pool: NDArray[Any],
    v_pool: NDArray[Any],
    out: NDArray[np.float32],
    sinks: NDArray[np.float32] | None,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    window_skip: bool,
) -> NDArray[Any]:
    """Return one of ``rows.LAYERS``; the arrays must be contiguous and outlive the launch."""
    num_kv_heads, head_dim = k_pool.shape[2:]
    group = q.shape[1] // num_kv_heads
    layer = np.zeros(1, dtype=LAYERS[k_pool.dtype])
    layer[0] = (
        address(q),
        address(k_pool),
        address(v_pool),
        address(out),
        0 if sinks is None else address(sinks),
        address(meta.block_tables),
        meta.block_tables.shape[1],
        q.shape[1],
        num_kv_heads,
        group,
        group,
        head_dim,
        meta.block_size,
        _NO_WINDOW if window is None else window,
        scale * _LOG2E if softcap is None else scale / softcap,
        0 if softcap is None else softcap * _LOG2E,
        window_skip,
        0,
        1,
        0,
        0,
        0,
    )
    return layer


def split(layer: NDArray[Any], chosen: Dispatch, parts: Partials | None) -> NDArray[Any]:
    """Return a layer for each unit among which a token's work on a KV head is divided.

    Member ``g`` serves query head ``g`` of every KV head: it sees arrays that begin there.
    """
    members = np.repeat(np.arange(chosen.members), chosen.partitions)
    layers = np.repeat(layer, len(members))
    head_bytes = 4 * int(layer["head_dim"][0])
    layers["group"] //= chosen.members
    layers["q"] += members * head_bytes
    layers["out"] += members * head_bytes
    layers["sinks"] += np.where(layers["sinks"] != 0, 4 * members, 0)
    if parts is not None:
        before = members * chosen.partitions
        layers["partition"] = np.tile(np.arange(chosen.partitions), chosen.members)
        layers["partitions"] = chosen.partitions
        layers["partial_sums"] = address(parts.sums) + before * head_bytes
        layers["partial_states"] = address(parts.states) + before * 8
    return layers


def base2(sinks: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return the sinks as logits in base 2; [0] if there are none."""
    if sinks is None:
        return np.zeros(0, np.float32)
    return sinks * np.float32(_LOG2E)


def address(array: NDArray[Any]) -> int:
    """Return where an array's memory begins."""
    if array.dtype.fields:  # whose description alone takes 20 us
        return int(array.ctypes.data)
    return int(array.__array_interface__["data"][0])
