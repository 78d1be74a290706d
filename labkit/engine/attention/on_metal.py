"""The fused backend of devices ``metal`` and ``emulated``: the Metal kernels, launched."""

from __future__ import annotations

import math
import secrets
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention import resolvers, validate, windows
from labkit.engine.attention.base import Array
from labkit.engine.attention.device_pools import DevicePools
from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.options import FusedOptions
from labkit.engine.attention.paged_backend import PagedBackend
from labkit.engine.attention.report import LaunchReport
from labkit.engine.attention.resolvers.seq_map import SeqMap
from labkit.engine.attention.resolvers.work_plan import WorkPlan
from labkit.metal import device
from labkit.metal.dispatch import BQ, Dispatch, choose, kernel_of
from labkit.metal.evidence import Evidence
from labkit.metal.launch import BLOCK_SIZES, Operands, Options, launch


class MetalBackend(PagedBackend):
    """Paged attention by the Metal kernels, on a Mac or on the emulator.

    Arrays may be NumPy's, or MLX's in float32, float16 or bfloat16; the output is of the
    same kind as ``q``. NumPy pools are copied to the device once: after the first
    ``attend`` they may change through ``write`` only.

    Raises
    ------
    ValueError
        ``emulated`` has no C++ compiler; one line that names what is missing.
    """

    def __init__(self, options: FusedOptions, name: str) -> None:
        super().__init__(options.resolver)
        self.name = name
        self._options = options
        self._executor = device.executor(name)
        self._pools = DevicePools()

    def write(
        self, k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata
    ) -> None:
        """Scatter new keys and values; see ``AttentionBackend.write``."""
        super().write(k, v, k_pool, v_pool, meta)
        kept = meta.slot_mapping >= 0
        slots = meta.slot_mapping[kept]
        self._pools.write((k_pool, v_pool), (k[kept], v[kept]), slots, meta.block_size)

    def attend(
        self,
        q: Any,
        k_pool: Any,
        v_pool: Any,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        out: Array | None = None,
    ) -> tuple[Any, LaunchReport]:
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
        if meta.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block size {meta.block_size}: device {self.name} takes "
                f"{', '.join(map(str, BLOCK_SIZES))}"
            )
        if not meta.total_q:
            raise ValueError(f"device {self.name}: no query tokens, nothing to launch")
        operands = Operands(
            _mlx(q),
            self._pools.copy_of(k_pool),
            self._pools.copy_of(v_pool),
            meta.block_tables,
            meta.seq_lens,
            meta.cu_seqlens_q,
        )
        chosen, operands = self._choose(operands, meta)
        options = Options(
            scale=scale,
            resolver=resolvers.KINDS[type(meta.lookup)],
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else _mlx(sinks),
            window_skip=self._options.window_skip,
        )
        launched = launch(operands, options, chosen, self._executor, nonce=secrets.randbits(32))
        mx.eval(launched.out)
        made = self._report(launched.evidence(), chosen, meta, operands, window)
        if out is not None:
            np.copyto(out, np.asarray(launched.out))
            return out, made
        return (launched.out if isinstance(q, mx.array) else np.array(launched.out)), made

    def _choose(self, operands: Operands, meta: AttentionMetadata) -> tuple[Dispatch, Operands]:
        """Return the dispatch, and the operands with what the resolver reads in its kernel."""
        shape, options = operands.shape(), self._options
        tiled = kernel_of(shape, tile_threshold=options.tile_threshold)[0] == "tiled"
        lookup: Any = None
        if isinstance(meta.lookup, SeqMap):
            lookup = meta.lookup.qblock_map if tiled else meta.lookup.token_map
        elif isinstance(meta.lookup, WorkPlan):
            lookup = meta.lookup.qblocks if tiled else meta.lookup.tokens
        chosen = choose(
            shape,
            resolver=resolvers.KINDS[type(meta.lookup)],
            split_kv=options.split_kv,
            gqa_sharing=options.gqa_sharing,
            tile_threshold=options.tile_threshold,
            planned=None if lookup is None else len(lookup),
        )
        arrays = (operands.q, operands.k_pool, operands.v_pool)
        return chosen, Operands(
            *arrays, meta.block_tables, meta.seq_lens, meta.cu_seqlens_q, lookup
        )

    def _report(
        self,
        evidence: Evidence,
        chosen: Dispatch,
        meta: AttentionMetadata,
        operands: Operands,
        window: int | None,
    ) -> LaunchReport:
        rows = BQ if chosen.kernel == "tiled" else 1
        columns = operands.q.shape[1] // chosen.heads
        visited = evidence.kv_blocks_visited
        skipped, masked = windows.outside(meta, rows, window, columns, visited)
        itemsize, head_dim = operands.q.itemsize, operands.q.shape[2]
        return LaunchReport(
            kernel=chosen.kernel,
            grid=chosen.groups,
            reason=chosen.reason,
            resolver=meta.resolver,
            stamp=evidence.stamp,
            expected_stamp=evidence.expected_stamp,
            search_iterations=evidence.search_iterations,
            dependent_loads=resolvers.dependent_loads(
                meta.lookup, evidence.search_iterations, math.prod(chosen.groups)
            ),
            surplus_threadgroups=evidence.surplus_threadgroups,
            kv_blocks_visited=visited,
            bytes=visited * 2 * itemsize * meta.block_size * head_dim + 2 * operands.q.nbytes,
            map_us=meta.map_us,
            device=self.name,
            partitions=chosen.partitions,
            sharing_heads=chosen.heads,
            block_size=meta.block_size,
            skipped_blocks=skipped,
            masked_blocks=masked,
        )


def _mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(np.ascontiguousarray(array))
