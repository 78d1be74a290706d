"""Keys and values quantised to 8 or 4 bits: the layout in KV pools, and the reference in NumPy.

A group of ``KV_GROUP`` adjacent elements of a head has a scale and a bias. The numbers are those of
``mlx.core.quantize``, which mlx_lm's QuantizedKVCache calls. Of the group's minimum and maximum,
the one with the larger magnitude is represented exactly. Every other element is represented by the
integer for which ``scale * integer + bias`` is nearest. In a pool, a group consists of::

    int8    scale, bias (float32), then 64 bytes
    int4    scale, bias (float32), then 32 bytes, each with two elements: byte ``i`` of the first 16
            with the elements ``i`` and ``i + 16``, byte ``i`` of the others with the elements
            ``i + 32`` and ``i + 48``, the first one in the low bits

The elements are in another order than in MLX, so that a vector of them is unpacked by one shift.

If an element is NaN or infinite, all elements of its group become NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.precision.kv_dtypes import (
    GROUP_HEADER_BYTES,
    KV_GROUP,
    POOL_DTYPES,
    QUANTIZED_BITS,
    group_bytes,
)

MIN_SCALE = 1e-7  # MLX's smallest scale of a group before it is adjusted to the bias
_HALF_VECTOR = 16  # elements that the two halves of an int4 byte are apart


def quantize(rows: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Quantise float32 [..., head_dim] to the bytes of a pool, [..., row bytes]."""
    bits = QUANTIZED_BITS[name]
    groups = np.ascontiguousarray(rows).reshape(-1, KV_GROUP)
    scales, biases = _scales_and_biases(groups, (1 << bits) - 1)
    with np.errstate(all="ignore"):
        places = np.rint((groups - biases) / scales)
        integers = np.nan_to_num(np.clip(places, 0, (1 << bits) - 1)).astype(np.uint8)
    packed = np.empty((len(groups), group_bytes(name)), np.uint8)
    packed[:, :4], packed[:, 4:GROUP_HEADER_BYTES] = scales.view(np.uint8), biases.view(np.uint8)
    if bits == 4:
        pairs = integers.reshape(-1, 2, 2, _HALF_VECTOR)
        integers = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(groups), -1)
    packed[:, GROUP_HEADER_BYTES:] = integers
    return packed.reshape(*rows.shape[:-1], -1).view(POOL_DTYPES[name])


def _scales_and_biases(
    groups: NDArray[np.float32], largest: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the scale and the bias of each group, float32 [groups, 1]."""
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        scales = np.maximum((high - low) / np.float32(largest), np.float32(MIN_SCALE))
        from_low = np.abs(low) > np.abs(high)
        scales, edges = np.where(from_low, scales, -scales), np.where(from_low, low, high)
        steps = np.rint(edges / scales)
        scales = np.where(steps != 0, edges / steps, scales).astype(np.float32)
        biases = np.where(steps != 0, edges, np.float32(0)).astype(np.float32)
    biases[~np.isfinite(groups).all(axis=1)] = np.nan
    return scales, biases


def dequantize(pool: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return the elements of quantised rows [..., row bytes] as float32 [..., head_dim]."""
    packed = np.ascontiguousarray(pool).view(np.uint8).reshape(-1, group_bytes(name))
    header = np.ascontiguousarray(packed[:, :GROUP_HEADER_BYTES]).view(np.float32)
    integers = packed[:, GROUP_HEADER_BYTES:]
    if QUANTIZED_BITS[name] == 4:
        halves = integers.reshape(-1, 2, 1, _HALF_VECTOR)
        integers = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(packed), -1)
    numbers = integers.astype(np.float32) * header[:, :1] + header[:, 1:]
    return numbers.reshape(*pool.shape[:-1], -1)
