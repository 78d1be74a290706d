"""``paged``: blocks of a pool, each request a table of them; nothing is ever moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.engine import prefix_cache
from labkit.engine.base import EngineError
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_cache_manager import KVCacheManager
from labkit.engine.kv_layout.kv_cache import KVLayout, LayerShape, Step

if TYPE_CHECKING:
    from labkit.engine.attention.paged_backend import PagedBackend
    from labkit.engine.input_builder import Batch


class Paged:
    """Makes paged layouts; see ``LayoutKind``.

    Parameters
    ----------
    make_backend
        Returns a backend that will own the pools of one layout.
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
        make_backend: Callable[[], PagedBackend],
        block_size: int,
        prefixes: str = "none",
        reuse_blocks: int = 1,
        dtype: str = "float32",
    ) -> None:
        self._make_backend = make_backend
        self._block_size = block_size
        self._prefixes = prefixes
        self._reuse_blocks = reuse_blocks
        self._dtype = dtype

    def create(self, shapes: tuple[LayerShape, ...], num_blocks: int) -> KVLayout:
        """Make a pool of so many blocks, the null block included.

        Raises
        ------
        EngineError
            The backend cannot hold what the layers cache; one line.
        """
        backend = self._make_backend()
        try:
            backend.allocate(shapes, num_blocks, self._block_size, self._dtype)
        except ValueError as error:
            raise EngineError(f"engine.kv.layout=paged: {error}") from error
        blocks = BlockPool(num_blocks)
        token_bytes = sum(shape.token_bytes(self._dtype) for shape in shapes)
        cache = KVCacheManager(
            blocks,
            self._block_size,
            prefix_cache.create(self._prefixes, blocks, self._block_size),
            self._reuse_blocks,
            block_bytes=self._block_size * token_bytes,
        )
        return KVLayout(cache, PagedMemory(backend))

    def holding(self, shapes: tuple[LayerShape, ...], requests: int, tokens: int) -> KVLayout:
        """Make a pool for so many requests of so many tokens each."""
        return self.create(shapes, requests * -(-tokens // self._block_size) + 1)


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
