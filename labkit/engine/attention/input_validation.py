"""Checks of layers and their arrays, so that all backends raise the same messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionLayer


def check_pools(keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the shapes or dtypes of the layers' pools do not match each other."""
    first = tuple(keys[0].shape[:2])
    for k_pool, v_pool in zip(keys, values, strict=True):
        k_shape, v_shape = list(k_pool.shape), list(v_pool.shape)
        if k_pool.ndim != 4 or v_pool.ndim != 4 or k_shape[:3] != v_shape[:3]:
            raise ValueError(
                "k_pool and v_pool must have the shape [num_blocks, block_size, num_kv_heads, "
                f"head_dim] and may differ in head_dim only, not {k_shape} and {v_shape}"
            )
        if tuple(k_shape[:2]) != first:
            raise ValueError(
                "all pools must have the same number of blocks and the same block size"
            )
        if k_pool.dtype != v_pool.dtype:
            dtypes = f"{dtype_name(k_pool)} and {dtype_name(v_pool)}"
            raise ValueError(f"k_pool and v_pool must have the same dtype, not {dtypes}")


def check_dtype(name: str, device: str, dtypes: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``name`` is among the ``dtypes`` of a device (empty: any)."""
    if dtypes and name not in dtypes:
        allowed = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}" if len(dtypes) > 1 else dtypes[0]
        raise ValueError(f"attention on device {device} supports {allowed}, not {name}")


def dtype_name(array: Any) -> str:
    """Return the name of a NumPy or MLX array's dtype."""
    dtype = getattr(array, "dtype", type(array).__name__)
    return str(dtype).removeprefix("mlx.core.")


def check_fused_layer(layer: AttentionLayer, device: str, max_head_dim: int) -> None:
    """Raise ``ValueError`` if the widths of a layer do not suit the fused kernels of a device."""
    gather = f"device {device}; set engine.attention.backend=gather"
    if layer.value_dim != layer.head_dim and not layer.latent:
        raise ValueError(
            f"keys have {layer.head_dim} and values {layer.value_dim} dimensions per head; these "
            f"must be equal for the fused kernels of {gather}"
        )
    if layer.head_dim % 16 or not 16 <= layer.head_dim <= max_head_dim:
        raise ValueError(
            f"head size {layer.head_dim}: must be a multiple of 16 from 16 to {max_head_dim} for "
            f"the fused kernels of {gather}"
        )


def check_layer(layer: AttentionLayer) -> None:
    """Raise ``ValueError`` if an argument of ``bind`` was out of range."""
    num_kv_heads, num_q_heads, softcap = layer.num_kv_heads, layer.num_q_heads, layer.softcap
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads, {num_q_heads}, is not a multiple of the {num_kv_heads} KV "
            "heads"
        )
    if not math.isfinite(layer.scale):
        raise ValueError(f"scale={layer.scale}: must be a finite number")
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"window={layer.window}: must be 1 or more (keys), or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap}: must be above 0, or None")
    if layer.sinks is not None and tuple(layer.sinks.shape) != (num_q_heads,):
        raise ValueError(f"sinks must have shape [{num_q_heads}], not {list(layer.sinks.shape)}")


def check_operands(
    layer: AttentionLayer, total_q: int, q: Any, k: Any, v: Any, out: NDArray[Any] | None
) -> None:
    """Raise ``ValueError`` if an array has a wrong shape or dtype for the layer.

    The message names the first such array. Fast backends compare all shapes and dtypes at once, and
    call this only if any differs.
    """
    if q.ndim != 3 or q.shape[0] != total_q:
        raise ValueError(
            f"q must have shape [total_q={total_q}, num_q_heads, head_dim], not {list(q.shape)}"
        )
    if q.shape[2] != layer.head_dim:
        raise ValueError(f"q has head size {q.shape[2]}, but the pools have {layer.head_dim}")
    if q.shape[1] != layer.num_q_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, but the layer was bound to {layer.num_q_heads}"
        )
    if layer.query_dtype not in (None, dtype_name(q)):
        raise ValueError(f"q has dtype {dtype_name(q)}, but the layer needs {layer.query_dtype}")
    if k is not None:
        _check_new_keys(layer, total_q, k, v)
    out_shape = (*q.shape[:2], layer.value_dim)
    if out is not None and (out.shape != out_shape or out.dtype != q.dtype):
        raise ValueError(
            f"out must be {q.dtype} {list(out_shape)}, not {out.dtype} {list(out.shape)}"
        )
    if out is not None and not out.flags.c_contiguous:
        raise ValueError("out must be contiguous")


def _check_new_keys(layer: AttentionLayer, total_q: int, k: Any, v: Any) -> None:
    k_shape = [total_q, layer.num_kv_heads, layer.head_dim]
    v_shape = [*k_shape[:2], layer.value_dim]
    if v is None:
        v, v_shape = k, k_shape
    if list(k.shape) != k_shape or list(v.shape) != v_shape:
        needed = f"{k_shape}" if v_shape == k_shape else f"{k_shape} and {v_shape}"
        raise ValueError(
            f"k and v must have shape {needed}, not {list(k.shape)} and {list(v.shape)}"
        )
    if not dtype_name(k) == dtype_name(v) == (layer.query_dtype or dtype_name(k)):
        needed = f"the layer needs {layer.query_dtype}" if layer.query_dtype else "they must agree"
        raise ValueError(f"k and v have dtypes {dtype_name(k)} and {dtype_name(v)}, but {needed}")
