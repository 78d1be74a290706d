"""The snapshots of recurrent and convolution states, with which a cached prefix can be reused.

Keys and values are stored for every token, but a recurrent state exists only after the last token
computed. So a prefix can be reused only up to a block at whose end a snapshot was taken. A snapshot
belongs to a block of the prefix cache: it is found by that block, and freed when the block is
evicted. SGLang's radix cache for Mamba and vLLM's hybrid KV cache manager work like this.

A chunk that ends at the end of a block leaves a snapshot, so chunks of prompts are cut there
(``align_chunk``). While a request decodes, only its last snapshot is kept. If there would be too
many snapshots, the least recently used one is freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.engine.recurrent_states.state_slots import StateSlot, StateSlotManager

if TYPE_CHECKING:
    from labkit.engine.request import RequestState
    from labkit.engine.scheduler.scheduler_output import ScheduledChunk

# Returns the cached block that ends the first n blocks of the tokens, or None.
FindBlock = Callable[[Sequence[int], int], int | None]


class StateSnapshots:
    """The snapshots of states: the slot of each snapshot, and the block it belongs to.

    ``slots``: the slots of requests and snapshots. ``capacity``: the largest number of snapshots.
    ``block_size``: tokens per block. ``unit``: a prefix is reused in multiples of this number of
    tokens, which is a multiple of ``block_size``. ``find_block``: looks up a block in the prefix
    cache.
    """

    def __init__(
        self,
        slots: StateSlotManager,
        capacity: int,
        block_size: int,
        unit: int,
        find_block: FindBlock,
    ) -> None:
        self._slots = slots
        self._capacity = capacity
        self._block_size = block_size
        self._unit = unit
        self._find_block = find_block
        self._by_block: OrderedDict[int, StateSlot] = OrderedDict()  # the least recently used first
        # By request: the snapshots whose blocks are not cached yet, with their numbers of tokens.
        self._pending: dict[str, list[tuple[int, StateSlot]]] = {}
        # By request: its last snapshot taken while it decoded, and the block it belongs to. The
        # block may be another request's by now, and have that request's snapshot.
        self._last_decoded: dict[str, tuple[int, StateSlot]] = {}
        self.taken = self.restored = self.evicted = 0

    def __len__(self) -> int:
        return len(self._by_block) + sum(map(len, self._pending.values()))

    def count_usable(self, blocks: Sequence[int]) -> int:
        """Return how many blocks of a cached prefix can be reused: up to its last snapshot."""
        step = self._unit // self._block_size
        counts = range(len(blocks) // step * step, 0, -step)
        return next((count for count in counts if blocks[count - 1] in self._by_block), 0)

    def restore(self, block: int) -> StateSlot:
        """Return the snapshot at the end of a block, and mark it as the most recently used."""
        self._by_block.move_to_end(block)
        self.restored += 1
        return self._by_block[block]

    def align_chunk(self, state: RequestState, start: int, count: int) -> int:
        """Return the largest length of a prompt chunk at whose end a snapshot can be taken.

        The length is at most ``count``, and ``count`` if no length allows a snapshot. The last
        snapshot of a prompt is taken before the prompt's last token, because every request
        computes that token itself.
        """
        stop = start + count
        if stop >= state.num_prefill_tokens:
            stop = min(stop, state.num_tokens - 1)
        aligned = stop // self._unit * self._unit
        return aligned - start if aligned > start else count

    def plan(self, chunk: ScheduledChunk) -> StateSlot | None:
        """Return a slot for a snapshot at the end of a chunk, or None if none is taken there."""
        state, stop = chunk.state, chunk.start + chunk.num_tokens
        if stop % self._unit:
            return None
        known = self._find_block(state.token_ids, stop // self._block_size)
        if known is not None and known in self._by_block:
            self._by_block.move_to_end(known)
            return None
        if not chunk.is_prefill:
            self._drop_last_decoded(state.request_id)
        if len(self) >= self._capacity and not self._evict():
            return None
        slot = self._slots.allocate(state)
        self._pending.setdefault(state.request_id, []).append((stop, slot))
        self.taken += 1
        return slot

    def _drop_last_decoded(self, request_id: str) -> None:
        block, slot = self._last_decoded.pop(request_id, (0, None))
        if slot is not None and self._by_block.get(block) is slot:
            self.drop([block])

    def _evict(self) -> bool:
        """Free the least recently used snapshot. Return False if there is none."""
        if not self._by_block:
            return False
        self.drop([next(iter(self._by_block))])
        self.evicted += 1
        return True

    def attach(self, state: RequestState) -> None:
        """Attach a request's snapshots to blocks that are cached by now, or free them."""
        pending = self._pending.get(state.request_id)
        if not pending:
            return
        computed = state.num_computed_tokens
        self._pending[state.request_id] = [item for item in pending if item[0] > computed]
        for num_tokens, slot in pending:
            if num_tokens > computed:
                continue
            block = self._find_block(state.token_ids, num_tokens // self._block_size)
            if block is None or block in self._by_block:
                self._slots.free(slot)
                continue
            self._by_block[block] = slot
            if num_tokens > state.num_prompt_tokens:
                self._last_decoded[state.request_id] = block, slot

    def drop(self, blocks: Iterable[int]) -> None:
        """Free the snapshots of blocks that are no longer cached. Other blocks are ignored."""
        for block in blocks:
            slot = self._by_block.pop(block, None)
            if slot is not None:
                self._slots.free(slot)

    def release(self, request_id: str) -> None:
        """Free a request's snapshots that are attached to no block. Unknown ids are ignored."""
        for _, slot in self._pending.pop(request_id, ()):
            self._slots.free(slot)
        self._last_decoded.pop(request_id, None)

    def used_slots(self) -> list[StateSlot]:
        pending = [slot for items in self._pending.values() for _, slot in items]
        return [*self._by_block.values(), *pending]

    def counters(self) -> dict[str, float]:
        return {
            "state_snapshots.taken": self.taken,
            "state_snapshots.restored": self.restored,
            "state_snapshots.evicted": self.evicted,
        }

    def reset_counters(self) -> None:
        self.taken = self.restored = self.evicted = 0

    def check(self, running: set[str], cached_blocks: Iterable[int]) -> None:
        """Raise ``AssertionError`` if a snapshot has no block or request, or too many exist."""
        if not self._by_block.keys() <= set(cached_blocks):
            raise AssertionError("a state snapshot remains although its block was evicted")
        if not self._pending.keys() <= running or not self._last_decoded.keys() <= running:
            raise AssertionError("a state snapshot belongs to a request that does not run")
        if len(self) > self._capacity:
            raise AssertionError("there are more state snapshots than slots for them")
