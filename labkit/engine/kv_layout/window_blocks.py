"""The blocks of layers with a sliding window: a request holds only those that it can still read.

A query at position ``p`` sees the keys ``p - window + 1 .. p``. Once the tokens before ``n`` are
final, every later query has position ``n`` or more, so blocks that end before ``n - window + 1``
are freed. In the block table the null block stands in their place, so that the block of a position
has the same index in every table. No kernel reads it: keys outside the window are skipped or
masked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.engine.block_pool import NULL_BLOCK, BlockPool

BlockIds = NDArray[np.int32]
NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


class WindowBlocks:
    """The block tables of all requests in the layers of one window (a KV cache group).

    ``pool``: the pool of the group's blocks. ``window``: the number of keys that a query sees, its
    own included. ``block_bytes``: bytes of one block over the group's layers.
    """

    def __init__(self, pool: BlockPool, window: int, block_bytes: int) -> None:
        self.pool = pool
        self.window = window
        self.block_bytes = block_bytes
        self._tables: dict[str, BlockIds] = {}
        self._num_freed: dict[str, int] = {}  # blocks at the front of a table that were freed
        self.num_slid = 0  # blocks freed because the window moved on

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over the group's layers."""
        return self.block_bytes // self.pool.block_size

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return self.pool.num_used * self.block_bytes

    def open(self, request_id: str) -> None:
        """Begin an empty table."""
        self._tables[request_id] = NO_BLOCKS
        self._num_freed[request_id] = 0

    def table(self, request_id: str) -> BlockIds:
        """Return a request's block ids in the order of its tokens. Freed blocks are ``NULL_BLOCK``.

        Tables are immutable: the same object always has the same blocks.
        """
        return self._tables[request_id]

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return the number of blocks to allocate before the first ``num_tokens`` tokens fit."""
        return max(0, self.pool.blocks_for(num_tokens) - len(self._tables[request_id]))

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Allocate the missing blocks.

        Raises ``ValueError`` if too few blocks are free. Nothing was allocated.
        """
        missing = self.num_missing(request_id, num_tokens)
        if missing:
            blocks = np.asarray(self.pool.allocate(missing), np.int32)
            self._tables[request_id] = np.concatenate([self._tables[request_id], blocks])

    def slide(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks that no query after the first ``num_tokens`` tokens sees."""
        behind = max(0, num_tokens - self.window + 1) // self.pool.block_size
        freed = self._num_freed[request_id]
        if behind <= freed:
            return
        table = self._tables[request_id].copy()
        self.pool.free(table[freed:behind].tolist())
        table[freed:behind] = NULL_BLOCK
        self._tables[request_id] = table
        self._num_freed[request_id] = behind
        self.num_slid += behind - freed

    def num_held_tokens(self, request_id: str, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens are in blocks that the request has."""
        return num_tokens - self._num_freed[request_id] * self.pool.block_size

    def release(self, request_id: str) -> None:
        """Free a request's blocks and forget its table."""
        self.pool.free(self._held(request_id))
        del self._tables[request_id], self._num_freed[request_id]

    def _held(self, request_id: str) -> list[int]:
        blocks: list[int] = self._tables[request_id][self._num_freed[request_id] :].tolist()
        return blocks

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests have tables and blocks.

        The pool's reference counts must agree with the tables.
        """
        if set(self._tables) != running:
            raise AssertionError("the tables of a window are not those of the running requests")
        self.pool.check([self._held(request_id) for request_id in self._tables])

    def reset_counters(self) -> None:
        """Set the counters to 0 and the peak to its present value."""
        self.pool.reset_counters()
        self.num_slid = 0
