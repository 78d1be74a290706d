"""The oracle: paged attention in float64 NumPy, one query token at a time.

The code is written to be obviously correct, not fast. It reads only the keys that a query sees, so
the contents of unused slots and masked positions cannot affect an output.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.launch_evidence import LaunchReport, launch_stamp
from labkit.engine.attention.paged_backend_base import PagedBackend


class ReferenceBackend(PagedBackend):
    """Attention in float64, over pools and queries of any floating dtype."""

    name = "reference"

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        if out is None:
            out = np.empty((*q.shape[:2], layer.value_dim), q.dtype)
        pools = self.keys[layer.index], self.values[layer.index]
        stamp = launch_stamp(secrets.randbits(32), "reference", metadata.resolver.variant)
        find, visited = metadata.resolver.find_token, 0
        with np.errstate(invalid="ignore", over="ignore"):
            for unit in range(
                metadata.resolver.token_units(metadata.lookup, metadata.cu_seqlens_q)
            ):
                sequence, token, _ = map(int, find(metadata.lookup, unit, metadata.cu_seqlens_q))
                if sequence < 0:
                    continue
                low, high = visible_keys(metadata, token, sequence, layer.window)
                keys = np.arange(low, high)
                blocks = metadata.block_tables[sequence, keys // metadata.block_size]
                offsets = keys % metadata.block_size
                k, v = (pool[blocks, offsets].astype(np.float64) for pool in pools)
                query, v = q[token].astype(np.float64), v[..., : layer.value_dim]
                out[token] = attend_token(query, k, v, layer.scale, layer.softcap, layer.sinks)
                visited += len(np.unique(keys // metadata.block_size))
        return out, LaunchReport(
            kernel="reference",
            grid=(metadata.total_q,),
            reason="the float64 oracle was requested",
            resolver=metadata.resolver.name,
            stamp=stamp,
            expected_stamp=stamp,
            layer=layer.index,
            kv_blocks_visited=visited,
            bytes=visited * layer.num_kv_heads * layer.block_bytes + 2 * q.nbytes,
            map_us=metadata.map_us,
            block_size=metadata.block_size,
        )


def visible_keys(
    metadata: AttentionMetadata, token: int, sequence: int, window: int | None
) -> tuple[int, int]:
    """Return the range of key positions [low, high) that a query token of a sequence sees.

    A faulty resolver may name the wrong sequence. The range is still within that sequence.
    """
    begin, end = (int(n) for n in metadata.cu_seqlens_q[sequence : sequence + 2])
    context = int(metadata.seq_lens[sequence]) if end > begin else 0
    high = max(0, min(context, context - (end - begin) + (token - begin) + 1))
    low = 0 if window is None else max(0, high - window)
    return low, high


def attend_token(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    scale: float,
    softcap: float | None,
    sinks: NDArray[Any] | None,
) -> NDArray[np.float64]:
    """Return one token's attention output, [num_q_heads, head_dim of ``v``].

    ``q`` is [num_q_heads, head_dim]. ``k`` and ``v`` are [keys, num_kv_heads, head_dim], and may
    differ in head_dim. The output is zeros if there are no keys, which happens only if
    ``metadata.resolver`` assigns the token to the wrong sequence.
    """
    if not len(k):
        return np.zeros((len(q), v.shape[2]))
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_kv_heads, -1, q.shape[1])
    logits = np.einsum("hgd,khd->hgk", grouped, k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    largest = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(np.float64).reshape(num_kv_heads, -1, 1)
        largest = np.maximum(largest, sink)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - largest)
    out: NDArray[np.float64] = np.einsum("hgk,khd->hgd", weights, v) / total
    return out.reshape(len(q), -1)
