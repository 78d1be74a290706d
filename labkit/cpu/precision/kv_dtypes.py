"""The types of keys and values in KV pools, and the NumPy dtypes of the pools.

NumPy has no bfloat16, so bfloat16 is stored as uint16: the upper half of a float32's bits.

``int8`` and ``int4`` are quantised in groups of ``KV_GROUP`` elements along the head. A pool then
contains bytes, whose layout ``kv_quantization_reference`` describes. NumPy has no 4-bit integers: a
pool of int8 has the dtype int8, one of int4 the dtype uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Bytes per element. Only the reference backend uses float64.
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
KV_GROUP = 64  # elements that share a scale and a bias, as in mlx_lm's QuantizedKVCache
QUANTIZED_BITS = {"int8": 8, "int4": 4}
GROUP_HEADER_BYTES = 8  # a group's scale and bias, float32 each
POOL_DTYPES: dict[str, np.dtype[Any]] = {
    **NUMPY_DTYPES,
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_POOL_NAMES = {dtype: name for name, dtype in POOL_DTYPES.items()}


def group_bytes(name: str) -> int:
    """Return the bytes of a group of ``KV_GROUP`` elements of a quantised type."""
    return GROUP_HEADER_BYTES + KV_GROUP * QUANTIZED_BITS[name] // 8


def row_bytes(name: str, head_dim: int) -> int:
    """Return the bytes of one head's key or value.

    Raises ``ValueError`` if the type is quantised and ``head_dim`` is not a multiple of
    ``KV_GROUP``.
    """
    if name not in QUANTIZED_BITS:
        return ITEM_BYTES[name] * head_dim
    if head_dim % KV_GROUP:
        raise ValueError(
            f"{name} keys and values are quantised in groups of {KV_GROUP}, but the head dimension "
            f"{head_dim} is not a multiple of {KV_GROUP}; set engine.kv.dtype=float32"
        )
    return head_dim // KV_GROUP * group_bytes(name)


def pool_columns(name: str, head_dim: int) -> int:
    """Return the length of a pool's last axis, which contains one head's key or value."""
    return row_bytes(name, head_dim) if name in QUANTIZED_BITS else head_dim


def head_dim_of(pool: NDArray[Any]) -> int:
    """Return the elements of one head's key or value in a pool."""
    name, columns = pool_dtype_name(pool), int(pool.shape[-1])
    return columns // group_bytes(name) * KV_GROUP if name in QUANTIZED_BITS else columns


def pool_dtype_name(array: NDArray[Any]) -> str:
    """Return the type of the keys or values in a pool.

    Raises ``ValueError`` if the array has another dtype, which KV pools do not support.
    """
    if array.dtype not in _POOL_NAMES:
        raise ValueError(
            f"a KV pool has the dtype {array.dtype}; must be one of: {', '.join(POOL_DTYPES)}"
        )
    return _POOL_NAMES[array.dtype]


def dtype_name(array: NDArray[Any]) -> str:
    """Return the element type of an array: ``float32``, ``float16`` or ``bfloat16`` (uint16).

    Raises ``ValueError`` if the array has another dtype.
    """
    if array.dtype not in _NAMES:
        raise ValueError(f"must be {', '.join(NUMPY_DTYPES)}, not {array.dtype}")
    return _NAMES[array.dtype]


def from_float32(numbers: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Return the numbers rounded to element type ``name`` (to the nearest, ties to even)."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):  # overflow to infinity without a warning
            return numbers.astype(NUMPY_DTYPES[name])
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the array's elements as float32, which is exact. uint16 is read as bfloat16."""
    if dtype_name(array) != "bfloat16":
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)
