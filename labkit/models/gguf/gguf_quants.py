"""Convert a tensor's GGUF blocks to the arrays of mlx_lm's layers.

Types with blocks of 32 values stay quantised: a block becomes a group of MLX's affine quantisation
with the same integers, scale and bias. Types with blocks of 256 values ("K") cannot be expressed in
MLX's quantisation and are dequantised to float16, as in MLX's own reader. The block layouts are
those of llama.cpp's ``ggml/src/ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
NamedArrays = dict[str, npt.NDArray[Any]]

Float32Array = npt.NDArray[np.float32]

GROUP_SIZE = 32
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits per weight of types that stay quantised


def convert_blocks(type_name: str, blocks: ByteArray) -> NamedArrays:
    """Convert the blocks of a tensor to arrays, by the array's name in mlx_lm's layer.

    Parameters
    ----------
    type_name
        A name in ``gguf_header.TENSOR_TYPES``.
    blocks
        ``[..., num_blocks, block_bytes]``.

    Returns
    -------
    dict
        For a type that stays quantised: ``weight`` ``[..., columns * bits / 32]`` in uint32,
        ``scales`` and ``biases`` ``[..., columns / 32]`` in float16. For any other type: ``weight``
        ``[..., columns]`` in float32 or float16.
    """
    return CONVERSIONS[type_name](blocks)


def _f32(blocks: ByteArray) -> NamedArrays:
    return {"weight": _join_blocks(blocks).view("<f4")}


def _f16(blocks: ByteArray) -> NamedArrays:
    return {"weight": _join_blocks(blocks).view("<f2")}


def _bf16(blocks: ByteArray) -> NamedArrays:
    """Convert bfloat16 to float32, because NumPy has no bfloat16."""
    upper = _join_blocks(blocks).view("<u2").astype(np.uint32)
    return {"weight": (upper << np.uint32(16)).view(np.float32)}


def _q4_0(blocks: ByteArray) -> NamedArrays:
    scales = _float16_at(blocks, 0)
    return _affine_arrays(_pair_nibbles(blocks[..., 2:]), scales, np.float16(-8) * scales)


def _q4_1(blocks: ByteArray) -> NamedArrays:
    return _affine_arrays(
        _pair_nibbles(blocks[..., 4:]), _float16_at(blocks, 0), _float16_at(blocks, 2)
    )


def _q8_0(blocks: ByteArray) -> NamedArrays:
    """Make signed bytes unsigned by adding 128, which the bias subtracts again."""
    scales = _float16_at(blocks, 0)
    return _affine_arrays(blocks[..., 2:] ^ np.uint8(0x80), scales, np.float16(-128) * scales)


def _q2_k(blocks: ByteArray) -> NamedArrays:
    """Dequantise 16 groups of 16 values of 2 bits, with scale and minimum of 4 bits."""
    scales, packed = blocks[..., :16], blocks[..., 16:80]
    scale = _float32_at(blocks, 80) * (scales & 0x0F).astype(np.float32)
    minimum = _float32_at(blocks, 82) * (scales >> 4).astype(np.float32)
    return _dequantize(_unpack_bits(packed, 2), scale, minimum)


def _q4_k(blocks: ByteArray) -> NamedArrays:
    """Dequantise 8 groups of 32 values of 4 bits, with scale and minimum of 6 bits."""
    low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, both & 0x0F | low >> 6 << 4], axis=-1)
    minimum = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=-1)
    return _dequantize(
        _unpack_bits(blocks[..., 16:], 4),
        _float32_at(blocks, 0) * scales.astype(np.float32),
        _float32_at(blocks, 2) * minimum.astype(np.float32),
    )


def _q6_k(blocks: ByteArray) -> NamedArrays:
    """Dequantise 16 groups of 16 values of 6 bits (stored as 4 and 2), with scales of 8 bits."""
    low, high = blocks[..., :128], blocks[..., 128:192]
    halves = low.reshape(*low.shape[:-1], 2, 64)
    fours = np.concatenate([halves & 0x0F, halves >> 4], axis=-1).reshape(*low.shape[:-1], 256)
    values = fours | _unpack_bits(high, 2) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scale = _float32_at(blocks, 208) * scales
    return _dequantize(values.view(np.int8) - np.int8(32), scale, np.zeros_like(scale))


def _unpack_bits(packed: ByteArray, bits: int) -> ByteArray:
    """Unpack runs of 32 bytes into values of ``bits`` bits.

    In each run, the values in the lowest bits of all bytes come first.
    """
    runs = packed.reshape(*packed.shape[:-1], -1, 1, 32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    values: ByteArray = runs >> shifts & np.uint8((1 << bits) - 1)
    return values.reshape(*packed.shape[:-1], -1)


def _dequantize(
    values: npt.NDArray[Any], scale: Float32Array, minimum: Float32Array
) -> NamedArrays:
    """Compute ``scale * value - minimum`` for every group, rounded to float16 at the end."""
    groups = values.reshape(*scale.shape, -1).astype(np.float32)
    halves = (scale[..., None] * groups - minimum[..., None]).astype(np.float16)
    return {"weight": halves.reshape(*values.shape[:-2], -1)}


def _pair_nibbles(packed: ByteArray) -> ByteArray:
    """Reorder a block's 4-bit values from GGML's to MLX's order.

    A byte has values i and i + 16 in GGML, and values i and i + 1 in MLX.
    """
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    paired: ByteArray = values[..., 0::2] | values[..., 1::2] << 4
    return paired


def _affine_arrays(
    packed: ByteArray, scales: npt.NDArray[Any], biases: npt.NDArray[Any]
) -> NamedArrays:
    return {"weight": _join_blocks(packed).view("<u4"), "scales": scales, "biases": biases}


def _float16_at(blocks: ByteArray, start: int) -> npt.NDArray[np.float16]:
    """Return the float16 at byte ``start`` of every block."""
    half: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")
    return half[..., 0]


def _float32_at(blocks: ByteArray, start: int) -> Float32Array:
    """Return the float16 at byte ``start`` of every block as float32, with a last axis of 1."""
    return _float16_at(blocks, start)[..., None].astype(np.float32)


def _join_blocks(blocks: ByteArray) -> ByteArray:
    """Merge the last two axes (blocks and their bytes) of a contiguous copy."""
    return np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1)


CONVERSIONS: dict[str, Callable[[ByteArray], NamedArrays]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
