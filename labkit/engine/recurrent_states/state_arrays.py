"""The arrays of recurrent and convolution states, and the states of a step.

A layer's code needs a batch of requests that have equally many tokens. So a step's requests are
grouped by their number of tokens, and each group's states are one batch of arrays. As long as the
same requests form a group, its states stay in these arrays: nothing is copied. If a group changes,
the new group's arrays are concatenated from rows of the old arrays. The states of a request that a
step leaves out are moved to the *pools*. A pool is one array per layer and entry of the layer's
cache, with a row for each slot.

MLX writes to a pool in place as long as no read of it is pending, so a step writes to a pool only
before it reads the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.kv_and_state_shapes import StateShape
from labkit.engine.engine_protocol import EngineError
from labkit.engine.recurrent_states.state_slots import StatePlan, StateSegment, StateSlot

# The states of a batch: for each layer, for each of the layer's entries, [requests, *shape].
States = list[list[mx.array]]


@dataclass(slots=True, eq=False)
class StateBatch:
    """The states of a group of requests after each part of a step.

    The first part consists of the tokens of each request. Each draft token is a part of its own,
    because drafts may be rejected. The mixers (``packed_recurrent_layers``) write ``parts``.
    """

    slots: tuple[StateSlot, ...]
    parts: list[list[list[mx.array | None]]]  # [part][layer][entry]

    @property
    def final(self) -> Any:
        """The states after the step. Rejected drafts must have been removed."""
        (final,) = self.parts
        return final


@dataclass(frozen=True, slots=True, eq=False)
class StateGroup:
    """The requests of a step with equally many tokens."""

    batch: StateBatch  # where mixers write the new states
    # The states before the step, ``[layer][entry]``. None if the requests begin in this step.
    base: States | None
    # The number of tokens and of draft tokens of each request
    num_tokens: int
    num_drafts: int
    # int32 [requests, num_tokens + num_drafts], the row of each token among the step's tokens.
    # None: the group has all tokens of the step, in order.
    rows: mx.array | None

    @property
    def parts(self) -> Iterator[tuple[int, int]]:
        """The token range [first, end) of each part."""
        yield 0, self.num_tokens
        for draft in range(self.num_drafts):
            yield self.num_tokens + draft, self.num_tokens + draft + 1

    def read(self, part: int, layer: int, entry: int) -> mx.array | None:
        """Return an entry of a layer's states before a part (None: the request begins there)."""
        if part:
            return self.batch.parts[part - 1][layer][entry]
        return None if self.base is None else self.base[layer][entry]

    def write(self, part: int, layer: int, entry: int, state: mx.array) -> None:
        self.batch.parts[part][layer][entry] = state


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The states of one step.

    The results of the groups are concatenated. ``order`` has, for each of the step's ``total_q``
    rows, the row of its result in the concatenated array (None: the same row). A row of padding
    gets the result of an arbitrary token. ``pools`` has the arrays of the pools if states were
    written to them before the step, else it is empty.
    """

    groups: tuple[StateGroup, ...]
    total_q: int
    order: mx.array | None
    pools: list[mx.array]

    def pending(self) -> list[mx.array]:
        """Return the lazy arrays that must be evaluated with the step."""
        written = [
            state
            for group in self.groups
            for part in group.batch.parts
            for layer in part
            for state in layer
            if state is not None
        ]
        return written + self.pools


class StateMemory:
    """The states of all requests.

    ``num_copied_bytes`` counts the bytes of states moved between arrays since the last reset.
    """

    def __init__(self, shapes: Sequence[StateShape], num_slots: int) -> None:
        self._shapes = tuple(shapes)
        self._slot_bytes = sum(shape.nbytes for shape in shapes)
        self._pools: States = [
            [
                mx.zeros((num_slots, *size), getattr(mx, dtype))
                for size, dtype in zip(shape.shapes, shape.dtypes, strict=True)
            ]
            for shape in shapes
        ]
        mx.eval(self._pools)
        # By slot, the batch and the row that have its states. Other slots' states are in the pools.
        self._places: dict[StateSlot, tuple[StateBatch, int]] = {}
        # Copies to make before the next step: a batch, the row, and the slot of the snapshot.
        self._snapshots: list[tuple[StateBatch, int, StateSlot]] = []
        self._has_written = False  # whether the pools have writes that are not evaluated
        self.num_copied_bytes = 0

    def forget(self) -> None:
        """Forget all states, because a step that should have computed some has failed."""
        self._places = {}
        self._snapshots = []
        self._has_written = True  # the failed step may not have evaluated the pools

    def _copy(self, forks: Sequence[tuple[StateSlot, StateSlot]]) -> None:
        """Write the last step's snapshots to the pools, then copy each source slot to its target.

        The copies are evaluated, so that no read of a pool is pending.
        """
        # Freed ones, too: this step's plan may have restored them before, or the next step's, which
        # is made while a thread runs this step. The slot's next user writes later.
        for batch, row, slot in self._snapshots:
            self._write(slot, batch.parts[0], row)
        self._snapshots = []
        for source, target in forks:
            index = mx.array([source.index])
            states: list[list[mx.array | None]] = [
                [pool[index] for pool in layer] for layer in self._pools
            ]
            mx.eval(states)
            self._places[target] = StateBatch((target,), [states]), 0
            self.num_copied_bytes += self._slot_bytes

    def _write(self, slot: StateSlot, layers: Sequence[Sequence[Any]], row: int) -> None:
        self._has_written = True
        self.num_copied_bytes += self._slot_bytes
        for layer_pools, layer in zip(self._pools, layers, strict=True):
            for pool, states in zip(layer_pools, layer, strict=True):
                pool[slot.index : slot.index + 1] = states[row : row + 1]

    def prepare(self, plan: StatePlan, rows: NDArray[Any] | None, total_q: int) -> StateStep:
        """Group the segments of a step, and gather the states of each group.

        ``plan``: the tokens of each request, in the order of the packed tokens. ``rows``: the row
        of each packed token among the computed tokens (None: the same row). ``total_q``: the number
        of computed tokens, padding included. Raises ``EngineError`` if a segment does not begin at
        the first token that the request's states have not consumed.
        """
        segments, forks = plan
        self._copy(forks)
        self._settle_drafts()
        for segment in segments:
            check_position(segment)
        self._flush({segment.slot for segment in segments})
        firsts = np.cumsum([0, *(s.num_tokens + s.num_drafts for s in segments)])
        flat = np.arange(firsts[-1]) if rows is None else rows
        groups, tokens = [], []
        for indexes in _group(segments):
            group, group_rows = self._create_group([segments[i] for i in indexes], firsts[indexes])
            tokens.append(flat[group_rows])
            groups.append(group)
        for group in groups:
            self._places |= {slot: (group.batch, i) for i, slot in enumerate(group.batch.slots)}
        self._snapshots = [
            (*self._places[segment.slot], segment.snapshot)
            for segment in segments
            if segment.snapshot is not None
        ]
        written, self._has_written = self._has_written, False
        pools = [pool for layer in self._pools for pool in layer] if written else []
        return _step(groups, tokens, total_q, pools)

    def _create_group(
        self, segments: Sequence[StateSegment], firsts: NDArray[Any]
    ) -> tuple[StateGroup, NDArray[Any]]:
        """Return a group and the packed rows of its tokens, [requests, tokens]."""
        slots = tuple(segment.slot for segment in segments)
        _, start, num_tokens, num_drafts, _ = segments[0]
        parts: list[list[list[mx.array | None]]] = [
            [[None] * len(shape.shapes) for shape in self._shapes] for _ in range(1 + num_drafts)
        ]
        base = self._gather(slots) if start else None
        for segment in segments:
            segment.slot.num_tokens += segment.num_tokens
        group = StateGroup(StateBatch(slots, parts), base, num_tokens, num_drafts, None)
        return group, firsts[:, None] + np.arange(num_tokens + num_drafts)

    def _gather(self, slots: tuple[StateSlot, ...]) -> States:
        places = [self._places.get(slot) for slot in slots]
        batch = places[0][0] if places[0] is not None else None
        if batch is not None and batch.slots == slots:
            final: States = batch.final
            return final
        self.num_copied_bytes += len(slots) * self._slot_bytes
        runs = list(_runs(slots, places))
        return [
            [
                _concatenate([self._source(batch, layer, entry)[a:b] for batch, a, b in runs])
                for entry in range(len(shape.shapes))
            ]
            for layer, shape in enumerate(self._shapes)
        ]

    def _source(self, batch: StateBatch | None, layer: int, entry: int) -> mx.array:
        array: mx.array = (self._pools if batch is None else batch.final)[layer][entry]
        return array

    def _flush(self, scheduled: set[StateSlot]) -> None:
        """Move the states of slots that leave their batch to the pools.

        A slot leaves its batch if another slot of the batch is scheduled and the slot itself is
        not. The states of free slots are dropped.
        """
        # A request may end while its last step is in flight: its slot is free but still scheduled.
        self._places = {
            slot: place
            for slot, place in self._places.items()
            if slot in scheduled or not slot.is_free
        }
        left = {self._places[slot][0] for slot in scheduled if slot in self._places}
        leaving = [
            slot
            for slot, (batch, _) in self._places.items()
            if batch in left and slot not in scheduled
        ]
        for slot in leaving:
            batch, row = self._places.pop(slot)
            self._write(slot, batch.final, row)

    def _settle_drafts(self) -> None:
        """Keep each slot's states after its last accepted draft token, and drop the others."""
        for batch in {batch for batch, _ in self._places.values() if len(batch.parts) > 1}:
            counts = [_accept_drafts(slot, len(batch.parts) - 1) for slot in batch.slots]
            if len(set(counts)) == 1:
                batch.parts = [batch.parts[counts[0]]]
                continue
            batch.parts = [
                [
                    [
                        _concatenate([_row(batch.parts[n][i][j], r) for r, n in enumerate(counts)])
                        for j in range(len(shape.shapes))
                    ]
                    for i, shape in enumerate(self._shapes)
                ]
            ]


def _accept_drafts(slot: StateSlot, num_drafts: int) -> int:
    """Return how many draft tokens of a slot's request were accepted, and count them."""
    if slot.is_free:
        return 0
    accepted = slot.owner.num_computed_tokens - slot.num_tokens
    if not 0 <= accepted <= num_drafts:
        raise EngineError(
            f"request {slot.owner.request_id}: its number of computed tokens implies that "
            f"{accepted} of {num_drafts} draft tokens were accepted"
        )
    slot.num_tokens += accepted
    return accepted


def check_position(segment: StateSegment) -> None:
    """Raise ``EngineError`` unless a segment begins at the first token not yet consumed."""
    slot = segment.slot
    if slot.num_tokens != segment.start:
        raise EngineError(
            f"request {slot.owner.request_id}: its recurrent states have consumed "
            f"{slot.num_tokens} tokens, but the step begins at token {segment.start}"
        )


def _group(segments: Sequence[StateSegment]) -> list[list[int]]:
    """Return the indexes of the segments of each group.

    A group's segments have equally many tokens and drafts. Segments that begin a request are in
    groups of their own, because a model may compute a request's first token in another way.
    """
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for index, segment in enumerate(segments):
        key = segment.num_tokens, segment.num_drafts, segment.start == 0
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _step(
    groups: list[StateGroup], tokens: list[NDArray[Any]], total_q: int, pools: list[mx.array]
) -> StateStep:
    """Return the step of ``groups``, with the rows of each group's tokens among all computed."""
    results = np.concatenate([rows.reshape(-1) for rows in tokens])
    if len(results) == total_q and (results == np.arange(total_q)).all():
        if len(groups) == 1:
            return StateStep(tuple(groups), total_q, None, pools)
        order = None
    else:
        position = np.zeros(total_q, np.int32)
        position[results] = np.arange(len(results), dtype=np.int32)
        order = mx.array(position)
    with_rows = tuple(
        StateGroup(g.batch, g.base, g.num_tokens, g.num_drafts, mx.array(rows.astype(np.int32)))
        for g, rows in zip(groups, tokens, strict=True)
    )
    return StateStep(with_rows, total_q, order, pools)


def _runs(
    slots: Sequence[StateSlot], places: Sequence[tuple[StateBatch, int] | None]
) -> Iterator[tuple[StateBatch | None, int, int]]:
    """Group the states of ``slots`` into runs of adjacent rows of one array, in order.

    ``places`` has the batch and the row of each slot's states (None: the slot's row in the pools).
    Yields each run's batch (None: the pools), first row and end (exclusive).
    """
    rows = [
        (None, slot.index) if place is None else place
        for slot, place in zip(slots, places, strict=True)
    ]
    for _, run in groupby(enumerate(rows), lambda item: (id(item[1][0]), item[1][1] - item[0])):
        members = [row for _, row in run]
        yield members[0][0], members[0][1], members[-1][1] + 1


def _concatenate(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _row(states: mx.array | None, row: int) -> mx.array:
    assert states is not None
    return states[row : row + 1]
