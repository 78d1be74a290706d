"""The policies of ``engine.scheduler``: functions that order, cap and admit requests.

Each option has a table from its values to a function. The scheduler looks the functions up once,
and counts ``<option>.<value>`` whenever the choice made a difference. Policies own no request.

For example, with ``order=decode_first``, ``composition=mixed`` and ``max_num_batched_tokens=8``, a
step beside two running decodes has 6 tokens left for prompts.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.config import Admission, ChunkPolicy, Composition, Order, Queue, Reservation
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import Phase

Phases = tuple[Phase, Phase]


# The order of the phases in a step. ``last``: the phase that had the last step to itself (None: the
# last step was mixed, or there was none).


def decodes_first(last: Phase | None) -> Phases:
    """Serve decodes first: running requests never wait for a prompt in their step."""
    return Phase.decode, Phase.prefill


def prefills_first(last: Phase | None) -> Phases:
    """Serve prefills first: a new request's first token never waits for decodes."""
    return Phase.prefill, Phase.decode


def alternating(last: Phase | None) -> Phases:
    """Serve decodes first, but prefills after a step of decodes only.

    This bounds the wait of both: in split steps, strict precedence of decodes would admit no
    request until every running one has ended.
    """
    return prefills_first(last) if last is Phase.decode else decodes_first(last)


# In a mixed step the second phase gets the tokens that the first leaves of the budget. A split step
# belongs to the first phase with anything to compute, so that decodes keep their shape.
PHASE_ORDERS: dict[tuple[Order, Composition], Callable[[Phase | None], Phases]] = {
    (Order.decode_first, Composition.mixed): decodes_first,
    (Order.decode_first, Composition.split): alternating,
    (Order.prefill_first, Composition.mixed): prefills_first,
    (Order.prefill_first, Composition.split): prefills_first,
}


# Whether another waiting request may be admitted. ``num_running``: requests that ran when the step
# began; ``budget``: tokens left in the step.


def continuous(num_running: int, budget: int) -> bool:
    """Admit as long as tokens are left, so that no blocks are reserved before they are used."""
    return budget > 0


def static(num_running: int, budget: int) -> bool:
    """Admit a whole batch once no request runs, regardless of the token budget.

    The next batch waits until the last request of this one has ended.
    """
    return num_running == 0


ADMISSIONS: dict[Admission, Callable[[int, int], bool]] = {
    Admission.continuous: continuous,
    Admission.static: static,
}


# The most tokens of one prompt in a step (None: no cap). ``chunk``: ``engine.scheduler.chunk``;
# ``num_decodes``: running requests with a token to decode.


def static_chunk(chunk: int | None, num_decodes: int) -> int | None:
    """Return ``chunk``, whatever else is in the step."""
    return chunk


def shrinking_chunk(chunk: int | None, num_decodes: int) -> int:
    """Return ``chunk`` less one token per decode, at least 1.

    A chunk and the decodes beside it are ``chunk`` tokens together, so that the step time of
    decoding requests does not depend on their number: the leftover-after-decode budget of
    LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md, patch 0016), per request.
    """
    assert chunk is not None  # the config refuses it
    return max(1, chunk - num_decodes)


CHUNK_CAPS: dict[ChunkPolicy, Callable[[int | None, int], int | None]] = {
    ChunkPolicy.static: static_chunk,
    ChunkPolicy.shrinking: shrinking_chunk,
}


# The most prompt tokens of all requests in a step. ``left``: tokens left of the step's budget.


def prefill_budget(left: int, cap: int | None, floor: int | None) -> int:
    """Return ``left``, but at least ``floor`` and at most ``cap`` (None: no such bound).

    ``cap`` alone is the static budget of LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md,
    patch 0013), which ignores the decodes; a budget that decodes shrink, with a floor, is its
    patch 0016: ``max(n_ubatch, T - D)``.
    """
    budget = left if floor is None else max(left, floor)
    return budget if cap is None else min(budget, cap)


# The tokens of KV memory that are reserved when a request is admitted, and the share of the whole
# memory that must stay free. ``watermark``: ``engine.scheduler.watermark``.


def full(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Reserve memory up to ``max_tokens``, used or not: nothing is ever preempted."""
    return state.max_kv_tokens, 0.0


def optimistic(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Reserve memory for the known tokens only; it grows with the output.

    As in vLLM, a share stays free, so that the next admission is not preempted at once, and a
    request that finds no memory preempts the last in the queue's order. If no request runs,
    nothing must stay free, so a request that fits the memory is always admitted.
    """
    return state.num_tokens, watermark if num_running else 0.0


RESERVATIONS: dict[Reservation, Callable[[RequestState, int, float], tuple[int, float]]] = {
    Reservation.full: full,
    Reservation.optimistic: optimistic,
}


# A request's key in the queue's order: unique, and fixed for the request's life. The smallest is
# served first, the largest preempted first.


def by_arrival(state: RequestState) -> tuple[int, int]:
    """Order by arrival, which puts a preempted request in front of all that were never admitted."""
    return 0, state.arrival_index


def by_priority(state: RequestState) -> tuple[int, int]:
    """Order by the client's priority, the lower number first; equal ones by arrival."""
    return state.request.priority, state.arrival_index


QUEUE_KEYS: dict[Queue, Callable[[RequestState], tuple[int, int]]] = {
    Queue.fcfs: by_arrival,
    Queue.priority: by_priority,
}
