"""Check at load that the kernels quantise and read keys and values like their reference.

A kernel that used the scale of another group, or lost a sign, would still return plausible numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from labkit.cpu.precision import kv_quantization_reference
from labkit.cpu.precision.kv_dtypes import KV_GROUP
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.engine.attention.kv_shape import KVShape
from labkit.engine.engine_protocol import EngineError

_TOKENS, _HEADS, _HEAD_DIM, _BLOCK_SIZE = 6, 2, 2 * KV_GROUP, 8


@cache
def verify(dtype: str) -> None:
    """Raise ``EngineError`` unless the kernels quantise and read ``dtype`` with the right bits.

    Each sequence has a single token, so its attention output is its own value.
    """
    from labkit.engine.attention.backends.cpu_backend import CpuBackend

    backend = CpuBackend(KernelSwitches())
    backend.allocate([KVShape(_HEADS, _HEAD_DIM, _HEAD_DIM)], _TOKENS, _BLOCK_SIZE, dtype)
    backend.bind(0, scale=1.0, heads=_HEADS)
    metadata = backend.plan(
        block_tables=np.arange(_TOKENS, dtype=np.int32)[:, None],
        seq_lens=np.ones(_TOKENS, np.int32),
        cu_seqlens_q=np.arange(_TOKENS + 1, dtype=np.int32),
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((_TOKENS, _HEADS, _HEAD_DIM), np.float32) for _ in range(3))
    for rows in (k, v):  # groups of one sign, of a single number, and of zeros
        rows[0], rows[1], rows[2, :, ::2], rows[3, 0] = np.abs(rows[0]), -np.abs(rows[1]), 3.0, 0.0
    out = backend.forward(0, q, k, v, metadata)
    keys, values = (kv_quantization_reference.quantize(rows, dtype) for rows in (k, v))
    read = kv_quantization_reference.dequantize(values, dtype)
    for what, actual, expected in (
        ("the stored keys", backend.keys[0][:, 0], keys),
        ("the stored values", backend.values[0][:, 0], values),
        ("the values that attention reads", out, read),
    ):
        if not np.array_equal(actual, expected):
            raise EngineError(
                f"engine.kv.dtype={dtype}: {what} differ from their reference; set "
                "engine.kv.dtype=float32"
            )
