"""The fused backend of device ``cpu``: chooses a kernel, launches it, reads its counters."""

from __future__ import annotations

import math
import secrets

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import metadata, resolvers, validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.cpu import kernels
from labkit.engine.attention.cpu.lookups import RESOLVER_IDS
from labkit.engine.attention.cpu.tiles import KEYS
from labkit.engine.attention.metadata import BQ, AttentionMetadata
from labkit.engine.attention.report import KERNEL_IDS, LaunchReport, launch_stamp

_NO_WINDOW = 1 << 40  # keys: more than any context
_NO_SINKS = np.empty(0, dtype=np.float32)
_LOG2E = math.log2(math.e)


class CpuBackend:
    """Paged attention in float32 by numba kernels, on numba's thread pool.

    A row's result is the same bits in every batch, by both kernels, with every resolver,
    block size and thread count. Not for two threads at once: a backend owns its scratch.

    Parameters
    ----------
    resolver
        ``binary_search``, ``seq_map``, ``identity`` or ``package.module:Class``.
    """

    name = "cpu"

    def __init__(self, resolver: str = "binary_search") -> None:
        self._resolver = resolvers.create(resolver)
        self._floats = np.empty((0, 0), dtype=np.float32)
        self._sources = np.empty((0, 2, KEYS), dtype=np.int64)

    def plan(
        self,
        *,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        cu_seqlens_q: NDArray[np.int32],
        block_size: int,
        total_q: int | None = None,
    ) -> AttentionMetadata:
        """Check a step's batch; see ``AttentionBackend.plan``."""
        return metadata.build(
            self._resolver,
            block_tables=block_tables,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            block_size=block_size,
            total_q=total_q,
        )

    def write(
        self, k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata
    ) -> None:
        """Scatter new keys and values; see ``AttentionBackend.write``."""
        validate.new_keys(k, v, k_pool, v_pool, meta.slot_mapping)
        validate.float32(k_pool)
        kernels.scatter(_packed(k), _packed(v), k_pool, v_pool, meta.slot_mapping)

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
        """Launch the decode or the tiled kernel; see ``AttentionBackend.attend``."""
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
        validate.float32(q)
        if out is None:
            out = np.empty(q.shape, dtype=np.float32)
        num_kv_heads, head_dim = k_pool.shape[2:]
        rows = (BQ if meta.has_prefill else 1) * (q.shape[1] // num_kv_heads)
        workers = numba.get_num_threads()
        self._reserve(workers, kernels.scratch_floats(rows, head_dim))
        nonce = secrets.randbits(32)
        counters = np.zeros((workers + 1, kernels.NUM_COUNTERS), dtype=np.int64)
        kernel = kernels.tiled if meta.has_prefill else kernels.decode
        kernel(
            nonce,
            meta.lookup,
            _packed(q),
            k_pool,
            v_pool,
            out,
            meta.block_tables,
            meta.seq_lens,
            meta.cu_seqlens_q,
            _NO_SINKS if sinks is None else np.ascontiguousarray(sinks, dtype=np.float32),
            np.float32(scale * _LOG2E if softcap is None else scale / softcap),
            np.float32(0 if softcap is None else softcap * _LOG2E),
            _NO_WINDOW if window is None else window,
            self._floats,
            self._sources,
            counters,
        )
        return out, self._report(nonce, meta, q, k_pool, counters[:-1])

    def _reserve(self, workers: int, floats: int) -> None:
        """Make the scratch large enough; its zeros are never written over."""
        if self._floats.shape[0] != workers or self._floats.shape[1] < floats:
            self._floats = np.zeros((workers, floats), dtype=np.float32)
            self._sources = np.zeros((workers, 2, KEYS), dtype=np.int64)

    def _report(
        self,
        nonce: int,
        meta: AttentionMetadata,
        q: Array,
        k_pool: Array,
        counters: NDArray[np.int64],
    ) -> LaunchReport:
        num_kv_heads = k_pool.shape[2]
        if meta.has_prefill:
            kernel, reason = "tiled", "more query tokens than sequences"
            grid = (num_kv_heads, meta.total_q // BQ + meta.num_seqs)
        else:
            kernel, reason = "decode", "no more query tokens than sequences"
            grid = (num_kv_heads, meta.total_q)
        stamps = counters[:, kernels.STAMP]
        visited = int(counters[:, kernels.BLOCKS].sum())
        head_block_bytes = 2 * 4 * meta.block_size * k_pool.shape[3]
        return LaunchReport(
            kernel=kernel,
            grid=grid,
            reason=reason,
            resolver=meta.resolver,
            stamp=int(stamps[0]) if (stamps == stamps[0]).all() else 0,
            expected_stamp=launch_stamp(nonce, KERNEL_IDS[kernel], RESOLVER_IDS[type(meta.lookup)]),
            search_iterations=int(counters[:, kernels.ITERATIONS].sum()),
            surplus_threadgroups=int(counters[:, kernels.SURPLUS].sum()),
            kv_blocks_visited=visited,
            bytes=visited * head_block_bytes + 2 * q.nbytes,
            map_us=meta.map_us,
        )


def _packed(array: Array) -> Array:
    """Return ``array`` in C order; the kernels are compiled for that alone."""
    return np.ascontiguousarray(array)
