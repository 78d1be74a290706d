"""The slots of recurrent and convolution states, and the snapshots that let a prefix be reused.

A slot has room for a request's states in all layers. Unlike blocks, a slot does not grow with the
request, and its contents are overwritten in every step. Snapshots of states are in slots too. The
module does not import MLX: ``state_memory`` has the arrays.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from labkit.engine.request import RequestState
    from labkit.engine.scheduler.scheduler_output import ScheduledChunk

# Returns the cached block that ends the first n blocks of the tokens, or None.
FindBlock = Callable[[Sequence[int], int], int | None]


@dataclass(slots=True, eq=False)
class StateSlot:
    """A slot in use by one request or snapshot. Its next user gets a new object."""

    index: int  # its row in the state pools
    # The request that uses the slot or, for a snapshot, the request whose states were copied. A
    # request's number of computed tokens shows which draft tokens were accepted.
    owner: RequestState
    num_tokens: int = 0  # that its states have consumed; draft tokens count once they are accepted
    is_free: bool = False  # whether it was freed


class StateSegment(NamedTuple):
    """The tokens of a request in a step: ``num_tokens`` from position ``start``, then drafts.

    ``snapshot`` is the slot for a copy of the states before the drafts (None: no copy).
    """

    slot: StateSlot
    start: int
    num_tokens: int
    num_drafts: int = 0
    snapshot: StateSlot | None = None


class StatePlan(NamedTuple):
    """What a step does with states, decided when the step is built.

    The plan is made this early because the step may run in another thread, while requests are
    admitted and end. ``forks`` has the (source, target) slots of the copies to make before the
    step. A source is a snapshot.
    """

    segments: tuple[StateSegment, ...]
    forks: tuple[tuple[StateSlot, StateSlot], ...] = ()


class StateSlotManager:
    """Gives each request a slot when it is admitted, and frees the slot when it ends.

    ``allocated`` and ``freed`` count since the last reset, ``peak_used`` is the largest number of
    requests with a slot at the same time. ``slot_bytes`` is the size of a slot over all layers.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: must be 1 or more")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.allocated = self.freed = self.peak_used = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, StateSlot] = {}
        self._forks: list[tuple[StateSlot, StateSlot]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._slots)

    @property
    def reserved_bytes(self) -> int:
        return self.num_used * self.slot_bytes

    def allocate(self, state: RequestState) -> StateSlot:
        """Return a free slot. Raises ``ValueError`` if no slot is free."""
        if not self._free:
            raise ValueError(f"allocate: none of {self.num_slots} state slots is free")
        self.allocated += 1
        return StateSlot(self._free.pop(), state)

    def free(self, slot: StateSlot) -> None:
        """Free a slot. Raises ``ValueError`` if the slot is free already."""
        if slot.is_free:
            raise ValueError(f"free: state slot {slot.index} is free already")
        slot.is_free = True
        self._free.append(slot.index)
        self.freed += 1

    def reserve(self, state: RequestState) -> StateSlot:
        """Give a request a slot. Raises ``ValueError`` if none is free, or it has one already."""
        if state.request_id in self._slots:
            raise ValueError(f"request {state.request_id} has a state slot already")
        slot = self._slots[state.request_id] = self.allocate(state)
        self.peak_used = max(self.peak_used, self.num_used)
        return slot

    def fork(self, source: StateSlot, target: StateSlot, num_tokens: int) -> None:
        """Plan a copy, before the next step, of states that have consumed ``num_tokens`` tokens."""
        target.num_tokens = num_tokens
        self._forks.append((source, target))

    def take_forks(self) -> tuple[tuple[StateSlot, StateSlot], ...]:
        """Return the (source, target) pairs of the planned copies, and clear the plan."""
        forks, self._forks = tuple(self._forks), []
        return forks

    def slot(self, request_id: str) -> StateSlot:
        return self._slots[request_id]

    def release(self, request_id: str) -> None:
        """Free a request's slot. Ids of requests without a slot are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self.free(slot)

    def counters(self) -> dict[str, float]:
        return {
            "state_slots.allocated": self.allocated,
            "state_slots.freed": self.freed,
            "state_slots.peak": self.peak_used,
            "state_slots.total": self.num_slots,
            "state_slot_bytes": self.slot_bytes,
        }

    def reset_counters(self) -> None:
        self.allocated = self.freed = 0
        self.peak_used = self.num_used

    def check(self, running: set[str], snapshots: Sequence[StateSlot] = ()) -> None:
        """Raise ``AssertionError`` unless ``running`` and ``snapshots`` have all used slots."""
        if set(self._slots) != running:
            raise AssertionError(
                f"requests with state slots: {', '.join(sorted(self._slots))}; running requests: "
                f"{', '.join(sorted(running))}"
            )
        used = [*self._slots.values(), *snapshots]
        if sorted([*self._free, *(slot.index for slot in used)]) != list(range(self.num_slots)):
            raise AssertionError("a state slot is leaked or has two owners")
        if any(slot.is_free for slot in used):
            raise AssertionError("a state slot that was freed is still used")


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
