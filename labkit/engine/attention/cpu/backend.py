"""The fused backend of device ``cpu``: chooses a kernel, launches it, reads its counters."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import elements, resolvers, validate, windows
from labkit.engine.attention.base import Array
from labkit.engine.attention.cpu import decode, dispatch, kernels, layers, tiled
from labkit.engine.attention.cpu.dispatch import Dispatch
from labkit.engine.attention.cpu.lookups import RESOLVER_IDS
from labkit.engine.attention.cpu.tiles import KEYS
from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.options import FusedOptions
from labkit.engine.attention.paged_backend import PagedBackend
from labkit.engine.attention.report import LaunchReport
from labkit.metal.dispatch import BQ
from labkit.metal.stamp import KERNEL_IDS, launch_stamp


class CpuBackend(PagedBackend):
    """Paged attention in float32 by numba kernels, on labkit's thread pool.

    The pools may be of half precision, which is converted in registers.

    A row's result is the same bits in every batch, by both kernels, with every resolver,
    block size, thread count and switch but ``split_kv``, which changes the order of
    summation. Not for two threads at once: a backend owns its scratch.
    """

    name = "cpu"

    def __init__(self, options: FusedOptions) -> None:
        super().__init__(options.resolver)
        self._options = options
        self._memory = aligned_zeros(1, 0)

    def write(
        self, k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata
    ) -> None:
        """Scatter new keys and values; see ``AttentionBackend.write``."""
        validate.new_keys(k, v, k_pool, v_pool, meta.slot_mapping, kernels.ELEMENTS)
        validate.float32(k)
        k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        kernels.scatter(
            kernels.ELEMENTS.index(k_pool.dtype),
            layers.address(k),
            layers.address(v),
            layers.address(k_pool),
            layers.address(v_pool),
            meta.slot_mapping,
            k_pool.shape[2] * k_pool.shape[3],
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
            kept=kernels.ELEMENTS,
        )
        validate.float32(q)
        if self._options.split_kv != "off" and KEYS % meta.block_size:
            raise ValueError(
                f"block size {meta.block_size}: split_kv={self._options.split_kv} cuts the keys "
                f"every {KEYS}, which must be whole blocks"
            )
        # Named here, so that a copy lives until the launch is over.
        q, k_pool, v_pool = (np.ascontiguousarray(array) for array in (q, k_pool, v_pool))
        out = np.empty(q.shape, dtype=np.float32) if out is None else out
        sinks = None if sinks is None else np.ascontiguousarray(sinks, dtype=np.float32)
        num_kv_heads, head_dim = k_pool.shape[2:]
        chosen = dispatch.choose(
            meta,
            self._options,
            num_q_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            workers=numba.get_num_threads(),
        )
        layer = layers.pack(
            q,
            k_pool,
            v_pool,
            out,
            sinks,
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            window_skip=self._options.window_skip,
        )
        counters = self._launch(chosen, layer, meta, q, sinks, out, k_pool)
        return out, report(meta, chosen, q, k_pool, counters, window)

    def _launch(
        self,
        chosen: Dispatch,
        layer: NDArray[Any],
        meta: AttentionMetadata,
        q: Array,
        sinks: Array | None,
        out: Array,
        k_pool: Array,
    ) -> Counted:
        """Run the chosen kernel, and the reduce kernel where the keys are split."""
        workers, stored, num_kv_heads = numba.get_num_threads(), k_pool.dtype, k_pool.shape[2]
        group = q.shape[1] // num_kv_heads
        if chosen.kernel == "tiled":
            size = tiled.scratch_bytes(BQ * group, q.shape[2])
        else:
            size = decode.scratch_bytes(chosen.heads * group, q.shape[2])
        self._reserve(workers, size)
        counters = np.zeros((workers + 1, kernels.NUM_COUNTERS), dtype=np.int64)
        nonce = secrets.randbits(32)
        work = (self._memory, counters, meta.cu_seqlens_q, meta.seq_lens, num_kv_heads)
        skip = self._options.window_skip
        if chosen.kernel == "tiled":
            body = tiled.body(stored, skip)
            kernels.tiled(nonce, meta.lookup, body, layers.address(layer), *work)
            return Counted(nonce, counters[:-1], None)
        parts = layers.partials(q, chosen.partitions) if chosen.partitions > 1 else None
        if chosen.members * chosen.partitions > 1:
            layer = layers.split(layer, chosen, parts)
        body = decode.body(stored, parts is None and skip)
        where = layers.address(layer)
        kernels.decode(nonce, meta.lookup, body, where, *work, chosen.heads, len(layer))
        if parts is None:
            return Counted(nonce, counters[:-1], None)
        merged = np.zeros_like(counters)
        resolver = RESOLVER_IDS[type(meta.lookup)]
        kernels.reduce(nonce, resolver, *parts, layers.base2(sinks), out, merged)
        return Counted(nonce, counters[:-1], merged[:-1])

    def _reserve(self, workers: int, size: int) -> None:
        """Make the scratch at least ``size`` bytes for each worker."""
        if self._memory.shape[0] != workers or self._memory.shape[1] < size:
            self._memory = aligned_zeros(workers, size)


def report(
    meta: AttentionMetadata,
    chosen: Dispatch,
    q: Array,
    k_pool: Array,
    counted: Counted,
    window: int | None,
) -> LaunchReport:
    """Sum what the workers counted; the stamp is theirs if they agree, else 0."""
    num_kv_heads, head_dim = k_pool.shape[2:]
    visited = int(counted.main[:, kernels.BLOCKS].sum())
    iterations = int(counted.main[:, kernels.ITERATIONS].sum())
    rows = BQ if chosen.kernel == "tiled" else 1
    columns = num_kv_heads * chosen.members
    skipped, masked = windows.outside(meta, rows, window, columns, visited)
    expected, written = counted.stamps(chosen.kernel, RESOLVER_IDS[type(meta.lookup)])
    return LaunchReport(
        kernel=chosen.kernel,
        grid=chosen.grid,
        reason=chosen.reason,
        resolver=meta.resolver,
        stamp=written,
        expected_stamp=expected,
        search_iterations=iterations,
        dependent_loads=resolvers.dependent_loads(meta.lookup, iterations, math.prod(chosen.grid)),
        surplus_threadgroups=int(counted.main[:, kernels.SURPLUS].sum()),
        kv_blocks_visited=visited,
        bytes=visited * 2 * k_pool.itemsize * meta.block_size * head_dim + 2 * q.nbytes,
        map_us=meta.map_us,
        device="cpu",
        partitions=chosen.partitions,
        sharing_heads=q.shape[1] // columns,
        block_size=meta.block_size,
        skipped_blocks=skipped,
        masked_blocks=masked,
        kv_dtype=elements.name_of(k_pool),
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """What the workers of a launch wrote: int64 [workers, NUM_COUNTERS] of each kernel."""

    nonce: int
    main: NDArray[np.int64]
    reduce: NDArray[np.int64] | None

    def stamps(self, kernel: str, resolver: int) -> tuple[int, int]:
        """Return the main kernel's stamp as it must be, and as all workers left it, or 0.

        It is 0, too, if the reduce kernel did not leave its own.
        """
        expected, found = launch_stamp(self.nonce, KERNEL_IDS[kernel], resolver), self.main
        ok = (found[:, kernels.STAMP] == expected).all()
        if self.reduce is not None:
            merged = launch_stamp(self.nonce, KERNEL_IDS["reduce"], resolver)
            ok = ok and (self.reduce[:, kernels.STAMP] == merged).all()
        # Another value would show whose stamp it is; 0 is nobody's.
        return expected, expected if ok else 0


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [rows, row_bytes] of zeros that starts on a cache line."""
    memory = np.zeros(rows * row_bytes + 64, dtype=np.uint8)
    start = -layers.address(memory) % 64
    return memory[start : start + rows * row_bytes].reshape(rows, row_bytes)
