"""From a tensor's blocks in a GGUF file to the arrays that mlx_lm's layers hold.

Blocks of 32 stay as they are: each is a group of MLX's affine quantisation, with the same
integers, scale and bias. Those of 256 ("K") have no such form and become float16, as mlx's
own reader makes them. Layout of the blocks: llama.cpp's ``ggml/src/ggml-common.h``.
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
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # of the types that stay quantised


def convert_blocks(type_name: str, blocks: ByteArray) -> NamedArrays:
    """Convert the blocks of a tensor.

    Parameters
    ----------
    type_name
        A name in ``header.TYPES``.
    blocks
        ``[..., blocks, bytes of a block]``.

    Returns
    -------
    dict
        ``weight`` alone ``[..., columns]``, float32 or float16; for a quantised type
        ``weight`` uint32 ``[..., columns * bits / 32]``, ``scales`` and ``biases`` float16
        ``[..., columns / 32]``.
    """
    return CONVERSIONS[type_name](blocks)


def _f32(blocks: ByteArray) -> NamedArrays:
    return {"weight": _join_blocks(blocks).view("<f4")}


def _f16(blocks: ByteArray) -> NamedArrays:
    return {"weight": _join_blocks(blocks).view("<f2")}


def _bf16(blocks: ByteArray) -> NamedArrays:
    """Widen to float32, which holds every bfloat16: NumPy has none."""
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
    """Signed bytes become unsigned ones, 128 larger."""
    scales = _float16_at(blocks, 0)
    return _affine_arrays(blocks[..., 2:] ^ np.uint8(0x80), scales, np.float16(-128) * scales)


def _q2_k(blocks: ByteArray) -> NamedArrays:
    """16 groups of 16 values: 2 bits each, scale and minimum 4 bits each."""
    scales, packed = blocks[..., :16], blocks[..., 16:80]
    scale = _float32_at(blocks, 80) * (scales & 0x0F).astype(np.float32)
    least = _float32_at(blocks, 82) * (scales >> 4).astype(np.float32)
    return _dequantize(_unpack_bits(packed, 2), scale, least)


def _q4_k(blocks: ByteArray) -> NamedArrays:
    """8 groups of 32 values: 4 bits each, scale and minimum 6 bits each."""
    low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, both & 0x0F | low >> 6 << 4], axis=-1)
    least = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=-1)
    return _dequantize(
        _unpack_bits(blocks[..., 16:], 4),
        _float32_at(blocks, 0) * scales.astype(np.float32),
        _float32_at(blocks, 2) * least.astype(np.float32),
    )


def _q6_k(blocks: ByteArray) -> NamedArrays:
    """16 groups of 16 values: 6 bits each, of which 4 and 2 lie apart, and 8 bits of scale."""
    low, high = blocks[..., :128], blocks[..., 128:192]
    halves = low.reshape(*low.shape[:-1], 2, 64)
    fours = np.concatenate([halves & 0x0F, halves >> 4], axis=-1).reshape(*low.shape[:-1], 256)
    values = fours | _unpack_bits(high, 2) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scale = _float32_at(blocks, 208) * scales
    return _dequantize(values.view(np.int8) - np.int8(32), scale, np.zeros_like(scale))


def _unpack_bits(packed: ByteArray, bits: int) -> ByteArray:
    """Unpack runs of 32 bytes: their lowest bits first, then the next ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, 32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    values: ByteArray = runs >> shifts & np.uint8((1 << bits) - 1)
    return values.reshape(*packed.shape[:-1], -1)


def _dequantize(values: npt.NDArray[Any], scale: Float32Array, least: Float32Array) -> NamedArrays:
    """Compute ``scale * value - least`` of every group; the products are exact."""
    groups = values.reshape(*scale.shape, -1).astype(np.float32)
    halves = (scale[..., None] * groups - least[..., None]).astype(np.float16)
    return {"weight": halves.reshape(*values.shape[:-2], -1)}


def _pair_nibbles(packed: ByteArray) -> ByteArray:
    """Reorder a block's nibbles: GGML has value i beside value i + 16, MLX beside i + 1."""
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    paired: ByteArray = values[..., 0::2] | values[..., 1::2] << 4
    return paired


def _affine_arrays(
    packed: ByteArray, scales: npt.NDArray[Any], biases: npt.NDArray[Any]
) -> NamedArrays:
    return {"weight": _join_blocks(packed).view("<u4"), "scales": scales, "biases": biases}


def _float16_at(blocks: ByteArray, start: int) -> npt.NDArray[np.float16]:
    """Return the float16 that begins so many bytes into every block."""
    half: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")
    return half[..., 0]


def _float32_at(blocks: ByteArray, start: int) -> Float32Array:
    """Return the same as float32, with an axis for what it scales."""
    return _float16_at(blocks, start)[..., None].astype(np.float32)


def _join_blocks(blocks: ByteArray) -> ByteArray:
    """Join the last two axes, contiguously."""
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
