"""The pool of KV blocks: who may use which block, and how many were ever used.

A block is in one of three states: *free*; *held*, by one owner or by several that share
it; or *idle*, held by nobody but kept because its contents may be asked for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Hands out the ids of KV blocks; block 0 is the null block and is never handed out.

    The last block freed is the first handed out again, so that a pool larger than the
    work touches little memory. ``peak_used`` is the most blocks held at once; idle ones
    do not count, for they can be had back at any time. ``num_blocks``: the null block included,
    at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: allowed are 2 or more")
        self.num_blocks = num_blocks
        self.capacity = num_blocks - 1  # blocks that can be handed out at most
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._owners = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self.num_evictable = 0
        self.allocated = self.freed = self.peak_used = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held now."""
        return self.capacity - len(self._free) - self.num_evictable

    @property
    def num_cached(self) -> int:
        """Blocks whose contents are kept, held or idle."""
        return self._kept.count(1)

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` are idle."""
        return sum(self._kept[block] and not self._owners[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` free blocks; the caller owns them until ``free``.

        Raises
        ------
        ValueError
            Fewer than ``count`` are free; nothing is handed out.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"allocate({count}): {len(self._free)} blocks are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        self.allocated += count
        self._note_peak()
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that are held or idle.

        Raises
        ------
        ValueError
            A block is free: nobody vouches for what it holds.
        """
        for block in blocks:
            if not self._owners[block]:
                if not self._kept[block]:
                    raise ValueError(f"block {block} is shared but free")
                self.num_evictable -= 1
            self._owners[block] += 1
        self._note_peak()

    def free(self, blocks: Iterable[int]) -> None:
        """Take an owner from each block, the last of a sequence first.

        A block without owners becomes idle if it is kept, else free.

        Raises
        ------
        ValueError
            A block has no owner (freed twice, or the null block).
        """
        for block in reversed(list(blocks)):
            if not self._owners[block]:
                raise ValueError(f"block {block} is freed but not in use")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._kept[block]:
                self.num_evictable += 1
            else:
                self._return(block)

    def cache(self, blocks: Iterable[int]) -> None:
        """Keep the contents of held blocks: without owners they become idle, not free.

        Raises
        ------
        ValueError
            A block is kept already or has no owner.
        """
        for block in blocks:
            if self._kept[block] or not self._owners[block]:
                raise ValueError(f"block {block} cannot be kept")
            self._kept[block] = 1

    def evict(self, blocks: Iterable[int]) -> None:
        """Keep the contents no longer: idle blocks become free, the last first.

        Raises
        ------
        ValueError
            A block is not kept.
        """
        for block in reversed(list(blocks)):
            if not self._kept[block]:
                raise ValueError(f"block {block} is dropped but not kept")
            self._kept[block] = 0
            if not self._owners[block]:
                self.num_evictable -= 1
                self._return(block)

    def _return(self, block: int) -> None:
        self._free.append(block)
        self.freed += 1

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_used)

    def reset_counters(self) -> None:
        """Start counting anew; the peak restarts from what is held."""
        self.allocated = 0
        self.freed = 0
        self.peak_used = self.num_used

    def check(self, owned: Iterable[Iterable[int]], kept: Iterable[int] = ()) -> None:
        """Raise ``AssertionError`` unless every block is free, idle or held as recorded.

        ``owned``: what each owner holds; a block that two hold is in both. ``kept``: the blocks
        whose contents are kept.
        """
        owners = Counter(block for blocks in owned for block in blocks)
        remembered = set(kept)
        every = sorted([*(owners.keys() | remembered), *self._free])
        if every != list(range(1, self.num_blocks)):
            raise AssertionError(
                f"blocks are lost or shared: {len(owners)} held, {len(remembered)} kept and "
                f"{len(self._free)} free of {self.capacity}"
            )
        if any(owners[block] != count for block, count in enumerate(self._owners)):
            raise AssertionError("the pool's record of owners disagrees with the owners")
        if remembered != {block for block, kept in enumerate(self._kept) if kept}:
            raise AssertionError("the pool's record of kept blocks disagrees with the cache")
        if self.num_evictable != self.count_evictable(remembered):
            raise AssertionError("the pool's count of idle blocks is wrong")
