"""The number types of a KV pool, and how NumPy holds each.

NumPy has no bfloat16: a bfloat16 is held as uint16, the upper half of the float32's bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Bytes of one number; the float64 is the reference backend's.
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def dtype_name(array: NDArray[Any]) -> str:
    """Return the type of a pool's numbers: ``float32``, ``float16`` or ``bfloat16``.

    Raises
    ------
    ValueError
        A pool cannot hold the array's dtype.
    """
    if array.dtype not in _NAMES:
        raise ValueError(f"a KV pool holds {', '.join(NUMPY_DTYPES)}, not {array.dtype}")
    return _NAMES[array.dtype]


def from_float32(numbers: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Return the numbers rounded to type ``name``: to the nearest, ties to even."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):  # too large for float16: infinity, and no warning
            return numbers.astype(NUMPY_DTYPES[name])
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the array's numbers as float32, which is exact; uint16 means bfloat16."""
    if dtype_name(array) != "bfloat16":
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)
