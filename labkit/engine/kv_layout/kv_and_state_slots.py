"""KV caches of models whose layers cache different things: a manager per kind of layer.

As with the KV cache groups of vLLM, the scheduler sees one manager. A request is admitted if every
group has memory for it, and its memory in all groups is released together. Layers with keys and
values are a group in the configured layout. Layers with a recurrent or convolution state are a
group of state slots.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from labkit.engine.kv_cache_interface import BlockTable, KVCache, KVCacheManager, StepAttention
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.recurrent_states.state_slots import (
    StatePlan,
    StateSegment,
    StateSlot,
    StateSlotManager,
)
from labkit.engine.recurrent_states.state_snapshots import StateSnapshots

if TYPE_CHECKING:
    from labkit.engine.attention.kv_and_state_shapes import StateShape
    from labkit.engine.batch import Batch
    from labkit.engine.recurrent_states.state_arrays import StateMemory
    from labkit.engine.request import RequestState
    from labkit.engine.scheduler.scheduler_output import SchedulerOutput


def add_states(
    attention: KVCache, shapes: tuple[StateShape, ...], num_slots: int, num_snapshots: int
) -> KVCache:
    """Return a cache that also has slots for the states of ``shapes``.

    ``attention`` holds the layers with keys and values. There are ``num_slots`` slots for requests
    and, if the layout caches prefixes, ``num_snapshots`` for snapshots.
    """
    from labkit.engine.recurrent_states.state_arrays import StateMemory

    total = num_slots + num_snapshots
    slots = StateSlotManager(total, sum(shape.nbytes for shape in shapes))
    states = StateMemory(shapes, total)
    manager = HybridKVCacheManager(attention.manager, slots, states, num_snapshots)

    def prepare_step(batch: Batch) -> tuple[Batch, StepAttention]:
        padded, step = attention.prepare_step(batch)
        if batch.states is None:  # a draft model runs the step
            return padded, step
        return padded, step._replace(states=states.prepare(batch.states, step.rows, padded.total_q))

    return KVCache(manager, attention.attention, prepare_step)


class HybridKVCacheManager(KVCacheManager):
    """Reserves keys and values in one manager, and a state slot in another.

    The counters of peak bytes are peaks of the sum over both managers. A cached prefix is reused up
    to its last snapshot of the states. There are at most ``num_snapshots`` snapshots.
    """

    has_states = True

    def __init__(
        self,
        attention: KVCacheManager,
        slots: StateSlotManager,
        states: StateMemory,
        num_snapshots: int,
    ) -> None:
        super().__init__(attention.token_bytes, attention.pool)
        self._attention = attention
        self._tables = attention._tables
        self.grows_by_chunk = attention.grows_by_chunk
        self._slots = slots
        self._states = states
        self._peak_bytes = 0
        self._snapshots: StateSnapshots | None = None
        if isinstance(attention, PagedKVCacheManager) and attention.caches_prefixes:
            self._snapshots = StateSnapshots(
                slots,
                num_snapshots,
                attention.pool.block_size,
                attention.reuse_tokens,
                attention.find_cached_block,
            )
            attention.limit_reuse(self._snapshots.count_usable, self._snapshots.drop)
            self.aligns_chunks = True
            self._paged = attention

    @property
    def reserved_bytes(self) -> int:
        return self._attention.reserved_bytes + self._slots.reserved_bytes

    @property
    def total_bytes(self) -> int:
        return self._attention.total_bytes + self._slots.num_slots * self._slots.slot_bytes

    @property
    def capacity_tokens(self) -> int:
        return self._attention.capacity_tokens

    def plan_states(self, output: SchedulerOutput) -> StatePlan:
        """Return each chunk's tokens and snapshot, and the copies to make before the step."""
        segments = []
        for chunk in output.chunks:
            request_id = chunk.state.request_id
            drafts = len(output.drafts.get(request_id, ()))
            snapshot = None if self._snapshots is None else self._snapshots.plan(chunk)
            slot = self._slots.slot(request_id)
            segments.append(StateSegment(slot, chunk.start, chunk.num_tokens, drafts, snapshot))
        return StatePlan(tuple(segments), self._slots.take_forks())

    def align_chunk(self, state: RequestState, start: int, count: int) -> int:
        assert self._snapshots is not None  # ``aligns_chunks``
        return self._snapshots.align_chunk(state, start, count)

    def used_bytes(self, num_tokens: int) -> int:
        return self._attention.used_bytes(num_tokens) + self._slots.reserved_bytes

    def refusal_reason(self, num_tokens: int) -> str | None:
        # Only keys and values count, because a state's size does not depend on the tokens.
        return self._attention.refusal_reason(num_tokens)

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        if not self._slots.num_free:
            return None
        num_cached = self._attention.reserve(state, num_tokens, spare)
        if num_cached is None:
            return None
        slot = self._slots.reserve(state)
        if num_cached:
            self._restore(slot, num_cached)
        self._update_peak()
        return num_cached

    def _restore(self, slot: StateSlot, num_cached: int) -> None:
        """Plan a copy of the snapshot at the end of the cached prefix to the request's slot."""
        assert self._snapshots is not None
        table = self._attention.table(slot.owner.request_id)
        block = table.block_ids[num_cached // self._paged.pool.block_size - 1]
        self._slots.fork(self._snapshots.restore(int(block)), slot, num_cached)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        has_grown = self._attention.grow(request_id, num_tokens)
        self._update_peak()
        return has_grown

    def cache_blocks(self, state: RequestState) -> None:
        self._attention.cache_blocks(state)
        if self._snapshots is not None:
            self._snapshots.attach(state)
        self._update_peak()

    def _update_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self.reserved_bytes)

    def release(self, request_id: str) -> None:
        if self._snapshots is not None:
            self._snapshots.release(request_id)
        self._attention.release(request_id)
        self._slots.release(request_id)

    def forget_failed_step(self) -> None:
        """Drop all states and, with their blocks, all snapshots.

        The failed step may have left copies of states undone, those of snapshots included whose
        blocks were cached by the step before it.
        """
        self._attention.forget_failed_step()
        self._slots.take_forks()
        self._states.forget()

    def num_slots(self, table: BlockTable) -> int:
        return self._attention.num_slots(table)

    def lingering_requests(self) -> Collection[str]:
        return self._attention.lingering_requests()

    def clear(self) -> None:
        self._attention.clear()

    def check(self, running: set[str]) -> None:
        self._attention.check(running)
        self._slots.check(running, () if self._snapshots is None else self._snapshots.used_slots())
        if self._snapshots is not None:
            self._snapshots.check(running, self._paged.cached_blocks())

    def counters(self) -> dict[str, float]:
        attention, peak = self._attention.counters(), self._peak_bytes
        used = attention["kv_used_bytes"] + self._slots.peak_used * self._slots.slot_bytes
        return {
            **attention,
            **self._slots.counters(),
            **({} if self._snapshots is None else self._snapshots.counters()),
            "state_bytes_copied": self._states.num_copied_bytes,
            "peak_kv_bytes": peak,
            "kv_used_bytes": min(used, peak),
        }

    def reset_counters(self) -> None:
        self._attention.reset_counters()
        self._slots.reset_counters()
        if self._snapshots is not None:
            self._snapshots.reset_counters()
        self._states.num_copied_bytes = 0
        self._peak_bytes = self.reserved_bytes
