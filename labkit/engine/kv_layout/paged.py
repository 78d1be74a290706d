"""``paged``: blocks of a pool, each request a table of them; nothing is ever moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_cache_manager import KVCacheManager
from labkit.engine.kv_layout.base import Array, KVLayout, LayerShape
from labkit.engine.kv_pools import KVPools

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend
    from labkit.engine.attention.metadata import AttentionMetadata
    from labkit.engine.attention.report import LaunchReport
    from labkit.engine.input_builder import Batch


class Paged:
    """Makes paged layouts; see ``LayoutKind``.

    Parameters
    ----------
    backend
        Writes and reads the pools.
    block_size
        Tokens in a block.
    prefixes
        The prefix cache: none, hash or radix.
    reuse_blocks
        Prefixes are reused in multiples of this many blocks.
    dtype
        What the pools hold: float32, float16 or bfloat16.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        block_size: int,
        prefixes: str = "none",
        reuse_blocks: int = 1,
        dtype: str = "float32",
    ) -> None:
        self._backend = backend
        self._block_size = block_size
        self._prefixes = prefixes
        self._reuse_blocks = reuse_blocks
        self._dtype = dtype

    def create(self, shapes: tuple[LayerShape, ...], num_blocks: int) -> KVLayout:
        """Make a pool of so many blocks, the null block included."""
        pools = KVPools(shapes, num_blocks, self._block_size, self._dtype)
        blocks = BlockPool(num_blocks)
        cache = KVCacheManager(
            blocks,
            self._block_size,
            prefix_cache.create(self._prefixes, blocks, self._block_size),
            self._reuse_blocks,
            block_bytes=pools.block_bytes,
        )
        return KVLayout(cache, PagedMemory(pools, self._backend))

    def holding(self, shapes: tuple[LayerShape, ...], requests: int, tokens: int) -> KVLayout:
        """Make a pool for so many requests of so many tokens each."""
        return self.create(shapes, requests * -(-tokens // self._block_size) + 1)


class PagedMemory:
    """The pools, read and written by a backend of paged attention."""

    def __init__(self, pools: KVPools, backend: AttentionBackend) -> None:
        self.pools = pools
        self._backend = backend

    def plan(self, batch: Batch) -> tuple[Batch, PagedStep]:
        """Build the metadata that the layers share; the batch stays as it is."""
        meta = self._backend.plan(
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            block_size=self.pools.block_size,
            total_q=batch.total_q,
        )
        return batch, PagedStep(self.pools, self._backend, meta)


class PagedStep:
    """One step over the pools; see ``StepAttention``."""

    def __init__(self, pools: KVPools, backend: AttentionBackend, meta: AttentionMetadata) -> None:
        self._pools = pools
        self._backend = backend
        self._meta = meta

    def counters(self) -> dict[str, float]:
        """Return the step, and the host time (us) of the resolver's maps."""
        return {"layout.paged": 1, "attention.map_us": self._meta.map_us}

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Scatter new keys and values into the layer's pools."""
        pools = self._pools
        self._backend.write(k, v, pools.keys[layer], pools.values[layer], self._meta)

    def attend(
        self, layer: int, q: Array, *, scale: float, window: int | None, sinks: Array | None
    ) -> tuple[Array, LaunchReport]:
        """Attend over the block tables."""
        pools = self._pools
        return self._backend.attend(
            q,
            pools.keys[layer],
            pools.values[layer],
            self._meta,
            scale=scale,
            window=window,
            sinks=sinks,
        )
