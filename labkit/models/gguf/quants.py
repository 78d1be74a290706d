"""From a tensor's blocks in a GGUF file to the arrays that mlx_lm's layers hold.

Values that are quantised stay as they are: a block of 32 is a group of MLX's affine
quantisation, with the same integers, scale and bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Arrays = dict[str, npt.NDArray[Any]]

GROUP = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # of the types that stay quantised


def arrays(type_name: str, blocks: Bytes) -> Arrays:
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


def _f32(blocks: Bytes) -> Arrays:
    return {"weight": _flat(blocks).view("<f4")}


def _f16(blocks: Bytes) -> Arrays:
    return {"weight": _flat(blocks).view("<f2")}


def _bf16(blocks: Bytes) -> Arrays:
    """Widen to float32, which holds every bfloat16: NumPy has none."""
    upper = _flat(blocks).view("<u2").astype(np.uint32)
    return {"weight": (upper << np.uint32(16)).view(np.float32)}


def _q4_0(blocks: Bytes) -> Arrays:
    scales = _half(blocks, 0)
    return _affine(_nibbles(blocks[..., 2:]), scales, np.float16(-8) * scales)


def _q4_1(blocks: Bytes) -> Arrays:
    return _affine(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Arrays:
    """Signed bytes become unsigned ones, 128 larger."""
    scales = _half(blocks, 0)
    return _affine(blocks[..., 2:] ^ np.uint8(0x80), scales, np.float16(-128) * scales)


def _nibbles(packed: Bytes) -> Bytes:
    """Reorder a block's nibbles: GGML has value i beside value i + 16, MLX beside i + 1."""
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    paired: Bytes = values[..., 0::2] | values[..., 1::2] << 4
    return paired


def _affine(packed: Bytes, scales: npt.NDArray[Any], biases: npt.NDArray[Any]) -> Arrays:
    return {"weight": _flat(packed).view("<u4"), "scales": scales, "biases": biases}


def _half(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """Return the float16 that begins so many bytes into every block."""
    half: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")
    return half[..., 0]


def _flat(blocks: Bytes) -> Bytes:
    """Join the last two axes, contiguously."""
    return np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1)


CONVERSIONS: dict[str, Callable[[Bytes], Arrays]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}
