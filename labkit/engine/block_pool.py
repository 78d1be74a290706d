"""The pool of KV blocks: who may use which block, and how many were ever used."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Hands out the ids of KV blocks; block 0 is the null block and is never handed out.

    The last block freed is the first handed out again, so that a pool larger than the
    work touches little memory.

    Parameters
    ----------
    num_blocks
        Blocks in the pool, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: allowed are 2 or more")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._used = bytearray(num_blocks)
        self.allocated = self.freed = self.peak_used = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at most."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks handed out now."""
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks; the caller owns them until ``free``.

        Raises
        ------
        ValueError
            Fewer than ``count`` are free; nothing is handed out.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"allocate({count}): {len(self._free)} blocks are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = 1
        self.allocated += count
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back, the last of a sequence first.

        Raises
        ------
        ValueError
            A block is not handed out (freed twice, or the null block).
        """
        for block in reversed(list(blocks)):
            if not self._used[block]:
                raise ValueError(f"block {block} is freed but not in use")
            self._used[block] = 0
            self._free.append(block)
            self.freed += 1

    def reset_counters(self) -> None:
        """Start counting anew; the peak restarts from what is in use."""
        self.allocated = 0
        self.freed = 0
        self.peak_used = self.num_used

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise ``AssertionError`` unless each block is free or owned exactly once."""
        held = [block for blocks in owned for block in blocks]
        every = sorted([*held, *self._free])
        if every != list(range(1, self.num_blocks)):
            raise AssertionError(
                f"blocks are lost or shared: {len(held)} owned and {len(self._free)} free "
                f"of {self.capacity}"
            )
        if any(not self._used[block] for block in held) or sum(self._used) != len(held):
            raise AssertionError("the pool's record of used blocks disagrees with the owners")
