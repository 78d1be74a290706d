"""The element types of KV pools that the attention kernels read.

The kernels are compiled once per element type. A field of the launch's parameters,
``kv_dtype_marker``, selects it by its own numba type.

A row of a pool is one head's key or value. It consists of *blocks*, whose vectors are loaded
together: a block is one vector of floating-point numbers, or a group of quantised elements. Both
kinds of element type have ``block_vectors``, ``block_bytes`` and ``load_vector``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from labkit.cpu.precision.half_precision import BFLOAT16, FLOAT16, FLOAT32, ElementType
from labkit.cpu.precision.quantized_kv_registers import INT4, INT8, QuantizedType

PoolElement = ElementType | QuantizedType
# The dtype of ``kv_dtype_marker`` in a launch's parameters, by the type of the KV pools. Integers
# represent the half-precision types, because numba has no float16 on the CPU.
MARKER_DTYPES = {
    "float32": np.float32,
    "float16": np.int16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "int4": np.uint8,
}
_BY_MARKER: dict[Any, PoolElement] = {
    types.float32: FLOAT32,
    types.int16: FLOAT16,
    types.uint16: BFLOAT16,
    types.int8: INT8,
    types.uint8: INT4,
}


def element_type(params: Any) -> PoolElement:
    """Return the element type of a launch's KV pools, given the numba type of its parameters."""
    return _BY_MARKER[params.typeof("kv_dtype_marker")]
