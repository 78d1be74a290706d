"""The slots of recurrent and convolution states, and what a step does with them.

A slot has room for a request's states in all layers. Unlike blocks, a slot does not grow with the
request, and its contents are overwritten in every step. Snapshots of states are in slots too
(``state_snapshots``). The module does not import MLX: ``state_arrays`` has the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from labkit.engine.request import RequestState


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
