"""Convert a tensor's GGUF blocks to the arrays of mlx_lm's layers, or of labkit's block layers.

A block's integers are only reordered for MLX's packing; their values stay. A type becomes one of
these:

- a layer of MLX's own quantisation, if MLX has the same format: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0
  are affine in groups of 32, and MXFP4 and NVFP4 are MLX's modes of these names;
- a layer in a format of ``labkit.cpu.precision.gguf_block_formats``, which has the type's name;
- float32, dequantised by the package gguf, if the type refers to code books.

The block layouts are those of llama.cpp's ``ggml/src/ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.models.gguf.gguf_header import WIDENED_TYPES, GGUFError

ByteArray = npt.NDArray[np.uint8]
NamedArrays = dict[str, npt.NDArray[Any]]

SLAB_BYTES = 1 << 24  # blocks are converted in slabs of this size, to limit temporary memory


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """The format of a quantised layer: an entry of ``quantization`` in config.json.

    ``mode`` is MLX's quantisation mode or the name of a block format.
    """

    bits: int
    group_size: int = 32
    mode: str = "affine"

    def entry(self) -> dict[str, Any]:
        """Return the entry. Like mlx_lm, it omits the mode ``affine``."""
        mode = {} if self.mode == "affine" else {"mode": self.mode}
        return {"group_size": self.group_size, "bits": self.bits, **mode}


def layout_of(type_name: str) -> QuantizedLayout | None:
    """Return the layout of a type that stays quantised, or None if it becomes floats."""
    return _CONVERSIONS[type_name].layout if type_name in _CONVERSIONS else None


def convert_blocks(type_name: str, blocks: ByteArray) -> NamedArrays:
    """Convert the blocks of a tensor to the arrays of a layer, by name.

    ``type_name``: a name in ``gguf_header.TENSOR_TYPES``. ``blocks``:
    ``[..., num_blocks, block_bytes]``. A type that stays quantised gives ``weight``
    ``[..., columns * bits / 32]`` in uint32, and the arrays of scales. Any other type gives
    ``weight`` ``[..., columns]`` in float32, in float16, or in bfloat16 (which is held as uint16).
    Raises ``GGUFError`` if the package gguf is needed and not installed.
    """
    convert = (
        _CONVERSIONS[type_name].convert if type_name in _CONVERSIONS else _by_package(type_name)
    )
    slabs = [convert(np.ascontiguousarray(slab)) for slab in _slabs(blocks)]
    if len(slabs) == 1:
        return slabs[0]
    return {name: np.concatenate([slab[name] for slab in slabs]) for name in slabs[0]}


def _slabs(blocks: ByteArray) -> Iterator[ByteArray]:
    """Yield the blocks in slabs of about ``SLAB_BYTES``, each of whole rows of the first axis."""
    rows = max(1, SLAB_BYTES // max(1, blocks[:1].nbytes))
    if blocks.ndim < 3 or len(blocks) <= rows:  # a vector has no rows
        yield blocks
        return
    for first in range(0, len(blocks), rows):
        yield blocks[first : first + rows]


def _by_package(type_name: str) -> Callable[[ByteArray], NamedArrays]:
    """Return a function that dequantises blocks with the package gguf."""
    assert type_name in WIDENED_TYPES
    if find_spec("gguf") is None:
        raise GGUFError(
            f"type {type_name} is read by the package gguf, which is not installed; run: "
            "pip install gguf"
        )
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[type_name]

    def convert(blocks: ByteArray) -> NamedArrays:
        return {"weight": quants.dequantize(_join_blocks(blocks), kind).astype(np.float32)}

    return convert


def _floats(dtype: str) -> Callable[[ByteArray], NamedArrays]:
    return lambda blocks: {"weight": _join_blocks(blocks).view(dtype)}


def _q4_0(blocks: ByteArray) -> NamedArrays:
    return _around(8, _half_blocks(blocks[..., 2:]), 4, _float16_at(blocks, 0))


def _q4_1(blocks: ByteArray) -> NamedArrays:
    scales, biases = _float16_at(blocks, 0), _float16_at(blocks, 2)
    return _packed(_half_blocks(blocks[..., 4:]), 4, scales=scales, biases=biases)


def _q5_0(blocks: ByteArray) -> NamedArrays:
    codes = _half_blocks(blocks[..., 6:]) | _bit_of_each(blocks[..., 2:6]) << np.uint8(4)
    return _around(16, codes, 5, _float16_at(blocks, 0))


def _q5_1(blocks: ByteArray) -> NamedArrays:
    codes = _half_blocks(blocks[..., 8:]) | _bit_of_each(blocks[..., 4:8]) << np.uint8(4)
    return _packed(codes, 5, scales=_float16_at(blocks, 0), biases=_float16_at(blocks, 2))


def _q8_0(blocks: ByteArray) -> NamedArrays:
    """Convert Q8_0. Adding 128 makes the codes unsigned; the bias subtracts it again."""
    return _around(128, blocks[..., 2:] ^ np.uint8(0x80), 8, _float16_at(blocks, 0))


def _q2_k(blocks: ByteArray) -> NamedArrays:
    """Convert Q2_K: 16 groups of 16 codes of 2 bits; a byte has a scale and a minimum of 4 bits."""
    return _packed(
        _unpack_bits(blocks[..., 16:80], 2),
        2,
        scales=_join_blocks(blocks[..., :16]),
        super_scales=_float16_at(blocks, 80),
        super_mins=_float16_at(blocks, 82),
    )


def _q3_k(blocks: ByteArray) -> NamedArrays:
    """Convert Q3_K: 16 groups of 16 codes of 3 bits (stored as 1 + 2 bits), 6-bit scales."""
    codes = _unpack_bits(blocks[..., 32:96], 2) | _unpack_bits(blocks[..., :32], 1) << np.uint8(2)
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    fours = np.concatenate([low & 0x0F, low >> 4], axis=-1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    twos = np.tile(high, 4) >> shifts & 3
    scales = (fours | twos << 4).view(np.int8) - np.int8(32)
    return _packed(codes, 3, scales=_join_blocks(scales), super_scales=_float16_at(blocks, 108))


def _q4_k(blocks: ByteArray) -> NamedArrays:
    """Convert Q4_K: 8 groups of 32 codes of 4 bits, 6-bit scales and minimums."""
    return _packed(_unpack_bits(blocks[..., 16:], 4), 4, **_six_bit_scales(blocks))


def _q5_k(blocks: ByteArray) -> NamedArrays:
    """Convert Q5_K: 8 groups of 32 codes of 5 bits (stored as 4 + 1 bits), scales of Q4_K."""
    codes = _unpack_bits(blocks[..., 48:], 4) | _unpack_bits(blocks[..., 16:48], 1) << np.uint8(4)
    return _packed(codes, 5, **_six_bit_scales(blocks))


def _q6_k(blocks: ByteArray) -> NamedArrays:
    """Convert Q6_K: 16 groups of 16 codes of 6 bits (stored as 4 + 2 bits), 8-bit scales."""
    low, high = blocks[..., :128], blocks[..., 128:192]
    halves = low.reshape(*low.shape[:-1], 2, 64)
    fours = np.concatenate([halves & 0x0F, halves >> 4], axis=-1).reshape(*low.shape[:-1], 256)
    return _packed(
        fours | _unpack_bits(high, 2) << np.uint8(4),
        6,
        scales=_join_blocks(blocks[..., 192:208]).view(np.int8),
        super_scales=_float16_at(blocks, 208),
    )


def _iq4_nl(blocks: ByteArray) -> NamedArrays:
    return _packed(_half_blocks(blocks[..., 2:]), 4, scales=_float16_at(blocks, 0))


def _iq4_xs(blocks: ByteArray) -> NamedArrays:
    """Convert IQ4_XS: 8 groups of 32 codes of 4 bits, 6-bit scales."""
    groups = np.arange(8)
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> (2 * groups).astype(np.uint16) & 3
    low = np.repeat(blocks[..., 4:8], 2, axis=-1) >> (4 * (groups % 2)).astype(np.uint8) & 0x0F
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    sixteens = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    codes = _half_blocks(sixteens).reshape(*blocks.shape[:-1], 256)
    return _packed(codes, 4, scales=_join_blocks(scales), super_scales=_float16_at(blocks, 0))


def _mxfp4(blocks: ByteArray) -> NamedArrays:
    return _packed(_half_blocks(blocks[..., 1:]), 4, scales=np.ascontiguousarray(blocks[..., 0]))


def _nvfp4(blocks: ByteArray) -> NamedArrays:
    """Convert NVFP4: 4 groups of 16 codes of 4 bits, scales in OCP's E4M3."""
    eights = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    codes = _half_blocks(eights).reshape(*blocks.shape[:-1], 64)
    scales = _join_blocks(blocks[..., :4])
    # GGML reads the pattern of E4M3's NaN as 0.
    return _packed(codes, 4, scales=np.where(scales == 0x7F, np.uint8(0), scales))


def _six_bit_scales(blocks: ByteArray) -> NamedArrays:
    """Return the scales and minimums of Q4_K and Q5_K: 6 bits each, in bytes 4 to 15."""
    low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return {
        "scales": _join_blocks(np.concatenate([low & 63, both & 0x0F | low >> 6 << 4], axis=-1)),
        "mins": _join_blocks(np.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=-1)),
        "super_scales": _float16_at(blocks, 0),
        "super_mins": _float16_at(blocks, 2),
    }


def _unpack_bits(packed: ByteArray, bits: int) -> ByteArray:
    """Unpack runs of 32 bytes into codes of ``bits`` bits: those in the lowest bits come first."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, 32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: ByteArray = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _half_blocks(packed: ByteArray) -> ByteArray:
    """Unpack bytes [..., n] into 4-bit codes [..., 2 n]: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _bit_of_each(packed: ByteArray) -> ByteArray:
    """Unpack bytes [..., n] into their bits [..., 8 n], the lowest bits first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _around(
    middle: int, codes: ByteArray, bits: int, scales: npt.NDArray[np.float16]
) -> NamedArrays:
    """Return the arrays of a layer whose weights are ``scale * (code - middle)``."""
    return _packed(codes, bits, scales=scales, biases=np.float16(-middle) * scales)


def _packed(codes: ByteArray, bits: int, **arrays: npt.NDArray[Any]) -> NamedArrays:
    """Return the arrays of a layer. ``codes`` are [..., num_blocks, block_values]."""
    return {"weight": pack_codes(_join_blocks(codes), bits), **arrays}


def pack_codes(codes: ByteArray, bits: int) -> npt.NDArray[np.uint32]:
    """Pack codes [..., K] of ``bits`` bits as MLX does: one stream of bits, the lowest first.

    K * bits must be divisible by 32.
    """
    eights = codes.reshape(-1, 8)
    words = np.zeros(len(eights), "<u8")
    for i in range(8):
        words |= eights[:, i].astype("<u8") << np.uint64(bits * i)
    used = np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :bits])
    return used.reshape(*codes.shape[:-1], -1).view("<u4")


def _float16_at(blocks: ByteArray, start: int) -> npt.NDArray[np.float16]:
    half: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")
    return half[..., 0]


def _join_blocks(blocks: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1)


@dataclass(frozen=True, slots=True)
class _Conversion:
    convert: Callable[[ByteArray], NamedArrays]
    layout: QuantizedLayout | None = None


_CONVERSIONS = {
    "F32": _Conversion(_floats("<f4")),
    "F16": _Conversion(_floats("<f2")),
    "BF16": _Conversion(_floats("<u2")),
    "Q4_0": _Conversion(_q4_0, QuantizedLayout(4)),
    "Q4_1": _Conversion(_q4_1, QuantizedLayout(4)),
    "Q5_0": _Conversion(_q5_0, QuantizedLayout(5)),
    "Q5_1": _Conversion(_q5_1, QuantizedLayout(5)),
    "Q8_0": _Conversion(_q8_0, QuantizedLayout(8)),
    "Q2_K": _Conversion(_q2_k, QuantizedLayout(2, 16, "q2_k")),
    "Q3_K": _Conversion(_q3_k, QuantizedLayout(3, 16, "q3_k")),
    "Q4_K": _Conversion(_q4_k, QuantizedLayout(4, 32, "q4_k")),
    "Q5_K": _Conversion(_q5_k, QuantizedLayout(5, 32, "q5_k")),
    "Q6_K": _Conversion(_q6_k, QuantizedLayout(6, 16, "q6_k")),
    "IQ4_NL": _Conversion(_iq4_nl, QuantizedLayout(4, 32, "iq4_nl")),
    "IQ4_XS": _Conversion(_iq4_xs, QuantizedLayout(4, 32, "iq4_xs")),
    "MXFP4": _Conversion(_mxfp4, QuantizedLayout(4, 32, "mxfp4")),
    "NVFP4": _Conversion(_nvfp4, QuantizedLayout(4, 16, "nvfp4")),
}
