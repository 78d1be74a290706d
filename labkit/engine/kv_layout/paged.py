"""``paged``: blocks of a pool, each request a table of them; nothing is ever moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.engine import prefix_cache
from labkit.engine.base import EngineError
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_cache_manager import KVCacheManager
from labkit.engine.kv_layout.kv_cache import KVLayout, LayerShape, Step

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.paged_backend import PagedBackend
    from labkit.engine.input_builder import Batch


def create(
    backend: PagedBackend,
    shapes: tuple[LayerShape, ...],
    num_blocks: int,
    kv: config.KV,
    dtype: str,
    prefixes: str = "none",
    reuse_blocks: int = 1,
) -> KVLayout:
    """Make a pool of so many blocks, the null block included.

    Parameters
    ----------
    backend
        Will own the pools.
    shapes
        What each layer caches per token.
    num_blocks, kv
        How many blocks, of how many tokens.
    dtype
        What the pools hold: float32, float16 or bfloat16.
    prefixes, reuse_blocks
        The prefix cache, and of how many blocks a reused prefix is a multiple.

    Raises
    ------
    EngineError
        The backend cannot hold what the layers cache; one line.
    """
    try:
        backend.allocate(shapes, num_blocks, kv.block_size, dtype)
    except ValueError as error:
        raise EngineError(f"engine.kv.layout=paged: {error}") from error
    blocks = BlockPool(num_blocks)
    cache = KVCacheManager(
        blocks,
        kv.block_size,
        prefix_cache.create(prefixes, blocks, kv.block_size),
        reuse_blocks,
        block_bytes=kv.block_size * sum(shape.token_bytes(dtype) for shape in shapes),
    )
    return KVLayout(cache, PagedMemory(backend))


class PagedMemory:
    """The pools of a backend of paged attention."""

    def __init__(self, backend: PagedBackend) -> None:
        self.attention = backend

    def plan(self, batch: Batch) -> tuple[Batch, Step]:
        """Build what the layers share; the batch stays as it is.

        Counted: the step, and the host time (us) of the resolver's maps.
        """
        plan = self.attention.plan(
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            total_q=batch.total_q,
        )
        counters = {"layout.paged": 1, "attention.map_us": plan.map_us}
        return batch, Step(self.attention, plan, counters)
