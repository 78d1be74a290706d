"""The fused backend of device ``cpu``: chooses a kernel, launches it, reads its counters."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import metadata, resolvers, validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.cpu import decode, dispatch, kernels, tiled
from labkit.engine.attention.cpu.dispatch import Dispatch
from labkit.engine.attention.cpu.lookups import RESOLVER_IDS
from labkit.engine.attention.cpu.rows import LAYER, scratch_bytes
from labkit.engine.attention.metadata import BQ, AttentionMetadata
from labkit.engine.attention.report import KERNEL_IDS, LaunchReport, launch_stamp

_NO_WINDOW = 1 << 40  # keys: more than any context
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
        self._memory = aligned_zeros(1, 0)

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
        k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        kernels.scatter(
            _address(k),
            _address(v),
            _address(k_pool),
            _address(v_pool),
            meta.slot_mapping,
            4 * k_pool.shape[2] * k_pool.shape[3],
        )

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
        # Named here, so that a copy lives until the launch is over.
        q, k_pool, v_pool = (np.ascontiguousarray(array) for array in (q, k_pool, v_pool))
        out = np.empty(q.shape, dtype=np.float32) if out is None else out
        sinks = None if sinks is None else np.ascontiguousarray(sinks, dtype=np.float32)
        layer = np.zeros(1, dtype=LAYER)
        num_kv_heads, head_dim = k_pool.shape[2:]
        layer[0] = (
            _address(q),
            _address(k_pool),
            _address(v_pool),
            _address(out),
            0 if sinks is None else _address(sinks),
            _address(meta.block_tables),
            meta.block_tables.shape[1],
            q.shape[1],
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            head_dim,
            meta.block_size,
            _NO_WINDOW if window is None else window,
            scale * _LOG2E if softcap is None else scale / softcap,
            0 if softcap is None else softcap * _LOG2E,
        )
        workers = numba.get_num_threads()
        chosen = dispatch.choose(meta, num_kv_heads, head_dim, workers)
        prefill = chosen.kernel == "tiled"
        rows = (BQ if prefill else 1) * (q.shape[1] // num_kv_heads)
        self._reserve(workers, scratch_bytes(rows, chosen.heads, head_dim))
        counters = np.zeros((workers + 1, kernels.NUM_COUNTERS), dtype=np.int64)
        nonce = secrets.randbits(32)
        batch = (meta.cu_seqlens_q, meta.seq_lens, num_kv_heads)
        launch = (_address(layer), self._memory, counters)
        if prefill:
            kernels.tiled(nonce, meta.lookup, tiled.body(), *launch, *batch)
        else:
            kernels.decode(nonce, meta.lookup, decode.body(), *launch, *batch, chosen.heads)
        return out, report(nonce, meta, chosen, q, k_pool, counters[:-1])

    def _reserve(self, workers: int, size: int) -> None:
        """Make the scratch at least ``size`` bytes for each worker."""
        if self._memory.shape[0] != workers or self._memory.shape[1] < size:
            self._memory = aligned_zeros(workers, size)


def report(
    nonce: int,
    meta: AttentionMetadata,
    chosen: Dispatch,
    q: Array,
    k_pool: Array,
    counters: NDArray[np.int64],
) -> LaunchReport:
    """Sum what the workers counted; the stamp is theirs if they agree, else 0."""
    stamps = counters[:, kernels.STAMP]
    visited = int(counters[:, kernels.BLOCKS].sum())
    head_block_bytes = 2 * k_pool.itemsize * meta.block_size * k_pool.shape[3]
    resolver_id = RESOLVER_IDS[type(meta.lookup)]
    return LaunchReport(
        kernel=chosen.kernel,
        grid=chosen.grid,
        reason=chosen.reason,
        resolver=meta.resolver,
        stamp=int(stamps[0]) if (stamps == stamps[0]).all() else 0,
        expected_stamp=launch_stamp(nonce, KERNEL_IDS[chosen.kernel], resolver_id),
        search_iterations=int(counters[:, kernels.ITERATIONS].sum()),
        surplus_threadgroups=int(counters[:, kernels.SURPLUS].sum()),
        kv_blocks_visited=visited,
        bytes=visited * head_block_bytes + 2 * q.nbytes,
        map_us=meta.map_us,
    )


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [rows, row_bytes] of zeros that starts on a cache line."""
    memory = np.zeros(rows * row_bytes + 64, dtype=np.uint8)
    start = -_address(memory) % 64
    return memory[start : start + rows * row_bytes].reshape(rows, row_bytes)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
