"""One launch's operands and options, packed as the kernels read them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.elements import STORED_AS
from labkit.engine.attention.plan import Layer, Plan
from labkit.engine.cpu.rows import LAYERS

_NO_WINDOW = 1 << 40  # keys: more than any context
_LOG2E = math.log2(math.e)


class Partials(NamedTuple):
    """What the partitions of split-KV leave: see ``launches.reduce``."""

    sums: NDArray[np.float32]
    states: NDArray[np.float32]


def partials(q: NDArray[np.float32], partitions: int) -> Partials:
    """Return memory for the partitions of every query token and head."""
    tokens, heads, head_dim = q.shape
    rows = (tokens, heads, partitions)
    return Partials(np.empty((*rows, head_dim), np.float32), np.empty((*rows, 2), np.float32))


def pack(layer: Layer, plan: Plan, window_skip: bool) -> NDArray[Any]:
    """Return one of ``rows.LAYERS``, without the addresses of the layer's own arrays.

    It points into the plan, which must outlive the launch.
    """
    group = layer.num_heads // layer.num_kv_heads
    packed = np.zeros(1, dtype=LAYERS[STORED_AS[layer.dtype]])
    packed[0] = (
        0,
        0,
        0,
        0,
        0,
        address(plan.block_tables),
        plan.block_tables.shape[1],
        layer.num_heads,
        layer.num_kv_heads,
        group,
        group,
        layer.head_dim,
        layer.block_size,
        _NO_WINDOW if layer.window is None else layer.window,
        layer.scale * _LOG2E if layer.softcap is None else layer.scale / layer.softcap,
        0 if layer.softcap is None else layer.softcap * _LOG2E,
        window_skip,
        0,
        1,
        0,
        0,
        0,
    )
    return packed


def split(layer: NDArray[Any], count: int, partitions: int, parts: Partials | None) -> NDArray[Any]:
    """Return a layer for each unit among which a token's work on a KV head is divided.

    ``count`` members, member ``g`` for query head ``g`` of every KV head, which sees arrays
    that begin there; each of them ``partitions`` times.
    """
    members = np.repeat(np.arange(count), partitions)
    layers = np.repeat(layer, len(members))
    head_bytes = 4 * int(layer["head_dim"][0])
    layers["group"] //= count
    layers["q"] += members * head_bytes
    layers["out"] += members * head_bytes
    layers["sinks"] += np.where(layers["sinks"] != 0, 4 * members, 0)
    if parts is not None:
        before = members * partitions
        layers["partition"] = np.tile(np.arange(partitions), count)
        layers["partitions"] = partitions
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
