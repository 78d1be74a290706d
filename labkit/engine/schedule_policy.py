"""The axes of ``engine.scheduler``: rules that order, cap and admit, and own no request.

An axis is a table from its words to a function of plain facts. The scheduler looks each up once,
and counts the word where the rule decided something.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.config import Admission, ChunkPolicy, Composition, Order, Queue, Reservation
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import Phase

Phases = tuple[Phase, Phase]


# Who goes first, given whose the last step was (None: both had a part, or there was none).


def decodes_first(last: Phase | None) -> Phases:
    """Running requests never wait for a prompt that shares their step."""
    return Phase.decode, Phase.prefill


def prefills_first(last: Phase | None) -> Phases:
    """A new request's first token is never kept waiting by decodes."""
    return Phase.prefill, Phase.decode


def in_turns(last: Phase | None) -> Phases:
    """Decodes first, but every other step is a prompt's.

    That bounds the wait of both: strict precedence of decodes, with steps of their own, would
    admit nobody until every running request has ended.
    """
    return prefills_first(last) if last is Phase.decode else decodes_first(last)


# In a mixed step the second phase takes what the first leaves of the token budget; a split step
# belongs to the first that has anything to compute, so that decodes keep their shape.
PHASE_ORDERS: dict[tuple[Order, Composition], Callable[[Phase | None], Phases]] = {
    (Order.decode_first, Composition.mixed): decodes_first,
    (Order.decode_first, Composition.split): in_turns,
    (Order.prefill_first, Composition.mixed): prefills_first,
    (Order.prefill_first, Composition.split): prefills_first,
}


# Whether another waiting request may join, given how many ran when the step began and how many
# tokens are left in it.


def continuous(num_running: int, budget: int) -> bool:
    """Admit whenever tokens are left, so that blocks are not held before they are used."""
    return budget > 0


def static(num_running: int, budget: int) -> bool:
    """Admit a whole batch once nothing runs, whatever the step's token budget.

    The next batch waits for the last request of this one to end.
    """
    return num_running == 0


ADMISSIONS: dict[Admission, Callable[[int, int], bool]] = {
    Admission.continuous: continuous,
    Admission.static: static,
}


# How many tokens of one prompt a step may compute (None: any), given ``engine.scheduler.chunk``
# and the decodes that want to be in the step.


def whole_chunk(chunk: int | None, num_decodes: int) -> int | None:
    """``chunk`` tokens, whatever else is computed."""
    return chunk


def shrinking_chunk(chunk: int | None, num_decodes: int) -> int:
    """``chunk`` tokens less one for each decode, at least 1.

    A chunk and the decodes beside it are together ``chunk`` tokens, so that a step costs
    decoding requests the same however many they are: the leftover-after-decode budget of
    LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md, patch 0016), for each request.
    """
    assert chunk is not None  # the config refuses it
    return max(1, chunk - num_decodes)


CHUNK_CAPS: dict[ChunkPolicy, Callable[[int | None, int], int | None]] = {
    ChunkPolicy.static: whole_chunk,
    ChunkPolicy.shrinking: shrinking_chunk,
}


# How many prompt tokens a step may compute, given what is left of its token budget.


def prefill_budget(left: int, cap: int | None, floor: int | None) -> int:
    """What is left, but at least ``floor`` and at most ``cap`` (None: no such bound).

    ``cap`` alone is the static budget of LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md,
    patch 0013), which ignores the decodes; a budget that decodes shrink, with a floor, is its
    patch 0016: ``max(n_ubatch, T - D)``.
    """
    budget = left if floor is None else max(left, floor)
    return budget if cap is None else min(budget, cap)


# For how many tokens a request must find memory to be admitted, and which share of all the
# memory must stay free beside it, given how many run and the watermark.


def full(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Memory to the request's very end, however little will be used: nothing is preempted."""
    return state.max_kv_tokens, 0.0


def optimistic(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Memory for the tokens known, the rest as they come.

    As in vLLM: a share stays free, so that the next admission is not preempted at once, and a
    request that finds no memory sends the last in line back to the queue. Nothing must stay free
    where nothing runs: a request that fits the memory is then always admitted.
    """
    return state.num_tokens, watermark if num_running else 0.0


RESERVATIONS: dict[Reservation, Callable[[RequestState, int, float], tuple[int, float]]] = {
    Reservation.full: full,
    Reservation.optimistic: optimistic,
}


# A request's place: unique, fixed for its life. The smallest is served first, the largest is
# preempted first.


def by_arrival(state: RequestState) -> tuple[int, int]:
    """In the order of arrival; a preempted request is thereby in front of all that wait."""
    return 0, state.arrival_index


def by_priority(state: RequestState) -> tuple[int, int]:
    """By the client's priority, the lower number first; equals in the order of arrival.

    A request is overtaken while it waits and preempted for others, as its number says.
    """
    return state.request.priority, state.arrival_index


QUEUE_KEYS: dict[Queue, Callable[[RequestState], tuple[int, int]]] = {
    Queue.fcfs: by_arrival,
    Queue.priority: by_priority,
}
