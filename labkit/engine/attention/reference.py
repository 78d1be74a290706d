"""The oracle: paged attention in float64 NumPy, one query token at a time.

Written to be obviously right, not fast. It reads only the keys that a query may see, so
nothing in an unused slot or at a masked position can reach an output.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.paged_backend import PagedBackend
from labkit.engine.attention.report import LaunchReport
from labkit.metal.stamp import KERNEL_IDS, launch_stamp


class ReferenceBackend(PagedBackend):
    """Float64 attention over the same arguments as every other backend.

    Parameters
    ----------
    resolver
        Which lookup names the sequence of each token.
    """

    name = "reference"

    def attend(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, LaunchReport]:
        """Attend in float64; see ``AttentionBackend.attend``."""
        validate.operands(
            q,
            k_pool,
            v_pool,
            total_q=meta.total_q,
            block_size=meta.block_size,
            max_block_id=meta.max_block_id,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )
        if out is None:
            out = np.empty_like(q)
        nonce = secrets.randbits(32)
        owners = meta.lookup.sequence_of_tokens(meta.total_q)
        block_bytes = 2 * k_pool.nbytes // max(1, len(k_pool))
        visited = 0
        with np.errstate(invalid="ignore", over="ignore"):
            for token, sequence in enumerate(owners):
                low, high = visible_keys(meta, token, int(sequence), window)
                keys = np.arange(low, high)
                blocks = meta.block_tables[sequence, keys // meta.block_size]
                offsets = keys % meta.block_size
                k, v = (pool[blocks, offsets].astype(np.float64) for pool in (k_pool, v_pool))
                out[token] = attend_token(q[token].astype(np.float64), k, v, scale, softcap, sinks)
                visited += len(np.unique(keys // meta.block_size))
        return out, LaunchReport(
            kernel="reference",
            grid=(meta.total_q,),
            reason="the float64 oracle was asked for",
            resolver=meta.resolver,
            stamp=launch_stamp(nonce, KERNEL_IDS["reference"], 0),
            expected_stamp=launch_stamp(nonce, KERNEL_IDS["reference"], 0),
            search_iterations=0,
            surplus_threadgroups=0,
            kv_blocks_visited=visited,
            bytes=visited * block_bytes + 2 * q.nbytes,
            map_us=meta.map_us,
            block_size=meta.block_size,
        )


def visible_keys(
    meta: AttentionMetadata, token: int, sequence: int, window: int | None
) -> tuple[int, int]:
    """Return the range of key positions that a query token sees.

    A wrong lookup may name any sequence; the range stays inside that sequence.
    """
    begin, end = (int(n) for n in meta.cu_seqlens_q[sequence : sequence + 2])
    context = int(meta.seq_lens[sequence]) if end > begin else 0
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
    """Attend from one token [num_q_heads, head_dim] to k, v [keys, num_kv_heads, head_dim].

    A token that sees no key (only a wrong lookup makes one) gets zeros.
    """
    if not len(k):
        return np.zeros_like(q)
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
    return out.reshape(q.shape)
