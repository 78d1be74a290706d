"""The element types of KV pools and their NumPy dtypes.

NumPy has no bfloat16, so bfloat16 is stored as uint16: the upper half of a float32's bits.
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
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def dtype_name(array: NDArray[Any]) -> str:
    """Return the element type of an array: ``float32``, ``float16`` or ``bfloat16`` (uint16).

    Raises
    ------
    ValueError
        The array has another dtype, which KV pools do not support.
    """
    if array.dtype not in _NAMES:
        raise ValueError(f"a KV pool holds {', '.join(NUMPY_DTYPES)}, not {array.dtype}")
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
