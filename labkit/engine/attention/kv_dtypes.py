"""The types that a KV pool's numbers may have, and how NumPy holds each.

NumPy has no bfloat16: its words are the upper halves of a float32's, as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STORED_AS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
_NAMES = {stored: name for name, stored in STORED_AS.items()}


def name_of(pool: NDArray[Any]) -> str:
    """Return the type of a pool's numbers: ``float32``, ``float16`` or ``bfloat16``.

    Raises
    ------
    ValueError
        A pool cannot hold this type.
    """
    if pool.dtype not in _NAMES:
        raise ValueError(f"a KV pool holds {', '.join(STORED_AS)}, not {pool.dtype}")
    return _NAMES[pool.dtype]


def rounded(numbers: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Return the numbers as a pool of type ``name`` holds them: the nearest, ties to even."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):  # to infinity, as every rounding to float16 does
            return numbers.astype(STORED_AS[name])
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)


def widened(pool: NDArray[Any]) -> NDArray[np.float32]:
    """Return what a pool or a scale holds as float32, exactly; bfloat16 is uint16."""
    if name_of(pool) != "bfloat16":
        return pool.astype(np.float32)
    return (pool.astype(np.uint32) << 16).view(np.float32)
