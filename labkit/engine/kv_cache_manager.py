"""Which request holds which KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A request's blocks in the order of its tokens: int32 [blocks]."""

    block_ids: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.block_ids)


class KVCacheManager:
    """Reserves blocks for requests and takes them back.

    Parameters
    ----------
    pool
        The blocks.
    block_size
        Tokens in a block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[str, BlockTable] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def fits_empty_pool(self, num_tokens: int) -> bool:
        """Tell whether ``num_tokens`` tokens would fit if nothing else were held."""
        return self.blocks_for(num_tokens) <= self.pool.capacity

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Hold blocks for ``num_tokens`` tokens; False, and nothing held, if too few are free.

        Raises
        ------
        ValueError
            The request holds blocks already.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} holds blocks already")
        count = self.blocks_for(num_tokens)
        if count > self.pool.num_free:
            return False
        self._tables[request_id] = BlockTable(np.asarray(self.pool.allocate(count), np.int32))
        return True

    def table(self, request_id: str) -> BlockTable:
        """Return the blocks that a request holds."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Free what a request holds; one that holds nothing is ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free(table.block_ids.tolist())

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests own blocks."""
        if set(self._tables) != running:
            raise AssertionError(f"blocks are held by {set(self._tables)}, running are {running}")
        self.pool.check(table.block_ids.tolist() for table in self._tables.values())
