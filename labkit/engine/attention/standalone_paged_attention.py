"""The public operation: paged attention over MLX or NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention import create, input_validation
from labkit.engine.attention.backends.mlx_backend_base import to_mlx
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.engine.attention.launch_evidence import LaunchReport

DTYPES = ("float32", "float16", "bfloat16")


def paged_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    *,
    block_tables: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    scale: float,
    resolver: str = "binary_search",
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    split_kv: str | int = "off",
    backend: str = "cpu",
) -> tuple[mx.array, LaunchReport]:
    """Attend over a paged KV cache, causally within each sequence.

    Query ``i`` of sequence ``s`` sees the keys at positions below
    ``seq_lens[s] - q_len[s] + i + 1``, where ``q_len[s]`` is the number of the sequence's queries.
    Every array may be an MLX or a NumPy array.

    Parameters
    ----------
    q
        [total_q, num_q_heads, head_dim], float32, float16 or bfloat16. ``cpu`` and ``reference``
        compute in a wider type.
    k_pool, v_pool
        [num_blocks, block_size, num_kv_heads, head_dim], with the dtype of q.
    block_tables
        int32 [num_seqs, max_blocks], padded with 0.
    seq_lens
        int32 [num_seqs], context including the new tokens.
    cu_seqlens_q
        int32 [num_seqs + 1], prefix sums of the query lengths.
    scale
        Factor by which ``q @ k`` is multiplied.
    resolver
        ``binary_search``, ``seq_map``, ``identity``, ``padded_grid``, ``work_plan`` or
        ``package.module:Class``.
    window
        The number of keys that a query sees, including its own (None: all).
    softcap
        ``c``: logits become ``c * tanh(logit * scale / c)`` (None: off).
    sinks
        [num_q_heads], an unscaled logit per head that is added to the softmax denominator.
    split_kv
        ``off``, ``auto`` or a number of partitions of the keys. It changes only how sums are
        rounded, and ``reference`` does not split.
    backend
        ``reference`` or the device of the fused kernels: ``cpu``, ``metal``, ``emulated`` or
        ``cuda``.

    Returns
    -------
    tuple
        The output [total_q, num_q_heads, head_dim], an MLX array with the dtype of q, and the
        report of the launch.

    Raises
    ------
    ValueError
        An argument is wrong. The message names it. Nothing was launched.
    """
    dtype = _common_dtype(q=q, k_pool=k_pool, v_pool=v_pool)
    fused, switches = backend != "reference", KernelSwitches(resolver, split_kv)
    attention = create(
        backend="fused" if fused else backend,
        device=backend if fused else "cpu",
        resolver=switches.resolver,
        split_kv=switches.split_kv if fused else "off",
    )
    convert: Callable[[Any], Any] = to_mlx if attention.arrays == "mlx" else _numpy
    queries, keys, values = map(convert, (q, k_pool, v_pool))
    if backend == "cpu":
        queries = queries.astype(np.float32, copy=False)  # its kernels read pools of any dtype
    attention.adopt([keys], [values])
    metadata = attention.plan(
        block_tables=_numpy(block_tables),
        seq_lens=_numpy(seq_lens),
        cu_seqlens_q=_numpy(cu_seqlens_q),
        total_q=len(queries),
    )
    attention.bind(
        0,
        scale=scale,
        heads=queries.shape[1] if queries.ndim > 1 else 0,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else _numpy(sinks),
    )
    out = attention.forward(0, queries, None, None, metadata)
    if attention.arrays == "mlx":
        mx.eval(out, attention.pending(metadata))
    (report,) = attention.report(metadata)
    return (out if isinstance(out, mx.array) else mx.array(out)).astype(dtype), report


def _common_dtype(**arrays: Any) -> mx.Dtype:
    """Return the arrays' common dtype. Raise ``ValueError`` if it differs or is not supported."""
    names = {name: input_validation.dtype_name(array) for name, array in arrays.items()}
    for name, dtype_name in names.items():
        if dtype_name not in DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, not {dtype_name}")
    if len(set(names.values())) > 1:
        raise ValueError(
            f"q, k_pool and v_pool must have the same dtype, not {', '.join(names.values())}"
        )
    dtype: mx.Dtype = getattr(mx, names["q"])
    return dtype


def _numpy(array: Any) -> Any:
    """Return a contiguous NumPy array. bfloat16, which NumPy lacks, becomes float32 (exact)."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if not isinstance(array, mx.array):
        return array
    if array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array)
