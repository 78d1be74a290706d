"""The pool of KV blocks: reference counts, the free list, and cached blocks.

A block has a reference for each request whose block table names it, and it may be cached, because
a later request may begin with the same tokens. Its state follows from both:

    references      cached    state
    none            no        free: its contents are undefined
    none            yes       evictable
    one or more     either    in use

    allocate    free -> in use, with one reference
    touch       adds a reference; evictable -> in use
    free        removes a reference; after the last, in use -> evictable if cached, else free
    cache       marks a block in use as cached
    evict       removes that mark; evictable -> free, while a block in use stays in use

The pool never evicts a block itself, and does not know which one was used last. If too few blocks
are free, ``PagedKVCacheManager`` lets the prefix cache choose the blocks to evict, and then
allocates.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Allocates KV blocks by id. Block 0 is the null block and is never allocated.

    The block freed last is allocated first, so that few requests touch little of a large pool, or,
    if ``fifo``, the one that has been free for longest. ``num_blocks`` includes the null block and
    is at least 2. ``block_size`` is the number of tokens that fit a block. ``allocated`` and
    ``freed`` count the blocks that left and entered the state *free*. ``peak_used`` is the largest
    number of blocks in use at the same time. ``on_evict``, unless it is None, is called with the
    blocks that ``evict`` is about to evict.

    If ``allocate`` raises, nothing has changed. The other methods raise at the first wrong block
    that they reach, when others have changed already.
    """

    def __init__(self, num_blocks: int, block_size: int, *, fifo: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: must be 2 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.capacity = num_blocks - 1  # blocks that can be allocated, without the null block
        self.fifo = fifo
        # Allocated from the right, where a block is freed to, or, if fifo, from the left.
        blocks = range(1, num_blocks)
        self._free = deque(blocks if fifo else reversed(blocks))
        self._ref_cnt = [0] * num_blocks  # by block id
        self._cached = bytearray(num_blocks)  # by block id: 1 if the block is cached, else 0
        self.num_evictable = 0
        self.allocated = self.freed = self.peak_used = 0
        self.on_evict: Callable[[Sequence[int]], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - len(self._free) - self.num_evictable

    @property
    def used_tokens(self) -> int:
        """Tokens that fit the blocks in use."""
        return self.num_used * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    @property
    def num_cached(self) -> int:
        return self._cached.count(1)

    def count_evictable(self, blocks: Iterable[int]) -> int:
        return sum(self._cached[block] and not self._ref_cnt[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Return free blocks with one reference each. Raises ``ValueError`` if too few are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"allocate({count}): the number of free blocks is {len(self._free)}")
        take = self._free.popleft if self.fifo else self._free.pop
        blocks = [take() for _ in range(count)]
        for block in blocks:
            self._ref_cnt[block] = 1
        self.allocated += count
        self._update_peak()
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. Raises ``ValueError`` if a block is free."""
        for block in blocks:
            if not self._ref_cnt[block]:
                if not self._cached[block]:
                    raise ValueError(f"touch: block {block} is free")
                self.num_evictable -= 1
            self._ref_cnt[block] += 1
        self._update_peak()

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block.

        A block without references becomes evictable if it is cached, else free. ``allocate`` will
        return the blocks in the order of ``blocks``.

        Raises ``ValueError`` if a block has no reference (it was freed twice, or is the null
        block).
        """
        for block in self._in_order_of_freeing(blocks):
            if not self._ref_cnt[block]:
                raise ValueError(f"free: block {block} is not in use")
            self._ref_cnt[block] -= 1
            if self._ref_cnt[block]:
                continue
            if self._cached[block]:
                self.num_evictable += 1
            else:
                self._append_free(block)

    def cache(self, blocks: Iterable[int]) -> None:
        """Mark blocks in use as cached. Raises ``ValueError`` if one is cached or not in use."""
        for block in blocks:
            if self._cached[block] or not self._ref_cnt[block]:
                raise ValueError(f"cache: block {block} is cached already or not in use")
            self._cached[block] = 1

    def evict(self, blocks: Iterable[int]) -> None:
        """Mark blocks as not cached (``ValueError``: one is not). Evictable ones become free."""
        blocks = list(blocks)
        if self.on_evict is not None:
            self.on_evict(blocks)
        for block in self._in_order_of_freeing(blocks):
            if not self._cached[block]:
                raise ValueError(f"evict: block {block} is not cached")
            self._cached[block] = 0
            if not self._ref_cnt[block]:
                self.num_evictable -= 1
                self._append_free(block)

    def _in_order_of_freeing(self, blocks: Iterable[int]) -> Sequence[int]:
        blocks = list(blocks)  # ``allocate`` takes the last freed first, unless fifo: reverse them
        return blocks if self.fifo else blocks[::-1]

    def _append_free(self, block: int) -> None:
        self._free.append(block)
        self.freed += 1

    def _update_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_used)

    def reset_counters(self) -> None:
        """Set the counters to 0, and the peak to the number of blocks in use now."""
        self.allocated = self.freed = 0
        self.peak_used = self.num_used

    def check(self, block_tables: Iterable[Iterable[int]], cached: Iterable[int] = ()) -> None:
        """Raise ``AssertionError`` unless the pool agrees with block tables and prefix cache.

        ``block_tables``: the block ids of each request. A shared block is in several tables.
        ``cached``: the ids of the blocks that the prefix cache holds.
        """
        references = Counter(block for blocks in block_tables for block in blocks)
        cached = set(cached)
        if sorted([*(references.keys() | cached), *self._free]) != list(range(1, self.num_blocks)):
            raise AssertionError(
                f"blocks are leaked or listed twice: {len(references)} in use, {len(cached)} "
                f"cached and {len(self._free)} free of {self.capacity}"
            )
        if any(references[block] != count for block, count in enumerate(self._ref_cnt)):
            raise AssertionError("the pool's reference counts disagree with the block tables")
        if cached != {block for block, flag in enumerate(self._cached) if flag}:
            raise AssertionError("the pool's cached blocks disagree with the prefix cache")
        if self.num_evictable != self.count_evictable(cached):
            raise AssertionError("the pool's count of evictable blocks is wrong")
