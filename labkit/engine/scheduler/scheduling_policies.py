"""The policies of ``engine.scheduler``, as functions of a step.

They decide the order of phases, admission, caps on chunks and prompt tokens, the reservation of KV
memory, and the queue's order. Each option has a table that maps its values to functions. ``select``
looks them up once, and ``count_decisions`` adds up where the choices made a difference. Policies
have no state.

For example, with ``order=decode_first``, ``composition=mixed`` and ``max_num_batched_tokens=8``, a
step with two running decodes has 6 tokens left for prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.config import (
    DEFAULT_WATERMARK,
    Admission,
    ChunkPolicy,
    Composition,
    Order,
    Reservation,
    Scheduler,
    is_class_path,
)
from labkit.engine import user_classes
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.request import QueueKey, Request, RequestState
from labkit.engine.scheduler.scheduler_output import Phase, StepBuilder

Phases = tuple[Phase, Phase]
DECODES_FIRST: Phases = Phase.decode, Phase.prefill
PREFILLS_FIRST: Phases = Phase.prefill, Phase.decode


def alternating(last: Phase | None) -> Phases:
    """Serve decodes first, but serve prefills first after a step of decodes only.

    This bounds the waiting time of both. If decodes always came first in split steps, no request
    would be admitted until every running request has ended.
    """
    return PREFILLS_FIRST if last is Phase.decode else DECODES_FIRST


# The order of the phases in a step, after a step with only one phase (None: that step was mixed, or
# there was none). In a mixed step the second phase gets the tokens that the first leaves of the
# budget. A split step has chunks of one phase only: the first one with anything to compute.
PHASE_ORDERS: dict[tuple[Order, Composition], Callable[[Phase | None], Phases]] = {
    (Order.decode_first, Composition.mixed): lambda last: DECODES_FIRST,
    (Order.decode_first, Composition.split): alternating,
    (Order.prefill_first, Composition.mixed): lambda last: PREFILLS_FIRST,
    (Order.prefill_first, Composition.split): lambda last: PREFILLS_FIRST,
}


# Functions that decide whether another waiting request may be admitted. ``num_running``: requests
# that were running when the step began; ``budget``: tokens left in the step.


def continuous(num_running: int, budget: int) -> bool:
    """Admit a request if the step has tokens left in its budget.

    Otherwise the request would hold blocks that it does not use yet.
    """
    return budget > 0


def static(num_running: int, budget: int) -> bool:
    """Admit a whole batch when no request is running, regardless of the token budget.

    The next batch waits until the last request of the present batch has ended.
    """
    return num_running == 0


ADMISSIONS = {Admission.continuous: continuous, Admission.static: static}


# The largest number of tokens of one prompt in a step (None: no cap). ``chunk``:
# ``engine.scheduler.chunk``; ``num_decodes``: running requests with a token to decode.


def shrinking_chunk(chunk: int | None, num_decodes: int) -> int:
    """Return ``chunk`` minus one token per decode, but at least 1.

    A chunk and the decodes of its step have ``chunk`` tokens together, so that the step time does
    not depend on the number of decodes. This is the leftover-after-decode budget of LocalAI's
    patched llama.cpp (DECODE_SERVING_SCOPE.md, patch 0016), applied to each request.
    """
    assert chunk is not None  # the config refuses it
    return max(1, chunk - num_decodes)


CHUNK_CAPS: dict[ChunkPolicy, Callable[[int | None, int], int | None]] = {
    ChunkPolicy.static: lambda chunk, num_decodes: chunk,
    ChunkPolicy.shrinking: shrinking_chunk,
}


# The number of prompt tokens that all requests of a step may have together.


def prefill_budget(left: int, cap: int | None, floor: int | None) -> int:
    """Return the number of prompt tokens that a step may compute.

    The number is ``left``, the rest of the step's budget after its decodes, but at least ``floor``
    and at most ``cap`` (None: no such bound). Sources, in LocalAI's patched llama.cpp
    (DECODE_SERVING_SCOPE.md): ``cap`` alone is patch 0013, a static budget; ``floor`` alone is
    patch 0016, ``max(n_ubatch, T - D)``.
    """
    budget = left if floor is None else max(left, floor)
    return budget if cap is None else min(budget, cap)


# The number of tokens for which KV memory is reserved when a request is admitted, and the fraction
# of the whole KV memory that must stay free. ``watermark``: ``engine.scheduler.watermark``.


def full(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Reserve memory for the prompt and ``max_tokens``, so that no request is ever preempted.

    Returns the number of tokens to reserve, and the fraction of the memory that must stay free: 0.
    """
    return state.max_kv_tokens, 0.0


def optimistic(state: RequestState, num_running: int, watermark: float) -> tuple[int, float]:
    """Reserve memory for the known tokens only. The reservation grows with the output.

    Returns the number of tokens to reserve, and the fraction of the memory that must stay free.
    As in vLLM, the fraction ``watermark`` stays free, so that an admitted request is not preempted
    at once. If memory runs out later, the request with the largest preemption key is preempted.
    If no request is running, nothing must stay free, so a request that fits the memory is always
    admitted.
    """
    return state.num_tokens, watermark if num_running else 0.0


RESERVATIONS = {Reservation.full: full, Reservation.optimistic: optimistic}


# A request's key in the queue's order: unique, and fixed for the request's life. The smallest is
# served first. It is the preemption key too, unless a user's class has one: the largest goes first.
# ``fcfs``: a preempted request precedes all requests that were never admitted. ``priority``: the
# client's, the lower number first, and by arrival if equal.
QUEUE_KEYS: dict[str, Callable[[RequestState], QueueKey]] = {
    "fcfs": lambda state: (0, state.arrival_index),
    "priority": lambda state: (state.request.priority, state.arrival_index),
}


class QueuePolicy:
    """The policy of ``engine.scheduler.queue``: a built-in order, or a user's class.

    The class has an attribute ``name`` and a method ``key(request)``, which returns a number: the
    request with the smallest is served first, the one with the largest preempted first. Equal
    numbers are served by arrival. Three more methods are optional: ``preemption_key(request)`` is a
    number of its own for preemption; ``admits(request, num_running, budget)`` says whether the
    first waiting request may join the running ones in a step with ``budget`` tokens left (when none
    runs, it must); ``prefills_first(num_decodes, num_prefills, num_waiting)`` says in every step
    whether prompts go before decodes.

    Raises ``EngineError`` if the class cannot be imported or called, or lacks ``name`` or ``key``,
    or decides the order of decodes and prefills although ``order`` does.
    """

    admits: Callable[[Request, int, int], bool] | None = None
    prefills_first: Callable[[int, int, int], bool] | None = None

    def __init__(self, name: str, order: Order = Order.decode_first) -> None:
        self.name = name
        if not is_class_path(name):
            self.key = self.preemption_key = QUEUE_KEYS[name]
            return
        try:
            own = user_classes.create_plugin("engine.scheduler.queue", name, ("key",))
        except ValueError as error:
            raise EngineError(str(error)) from error
        for method, mistake in QUEUE_METHODS.items():
            if hasattr(own, method):
                where = f"engine.scheduler.queue={name}"
                user_classes.guard_method(own, where, method, mistake)
        self.name, self.admits = own.name, getattr(own, "admits", None)
        self.prefills_first = getattr(own, "prefills_first", None)
        if self.prefills_first is not None and order is not Order.decode_first:
            raise EngineError(
                f"engine.scheduler.order={order.value}: {name} decides it (prefills_first); leave "
                f"engine.scheduler.order={Order.decode_first.value}"
            )
        self.key = self.preemption_key = _queue_key(own.key)
        if hasattr(own, "preemption_key"):
            self.preemption_key = _queue_key(own.preemption_key)


def _queue_key(method: Callable[[Request], float]) -> Callable[[RequestState], QueueKey]:
    return lambda state: (float(method(state.request)), state.arrival_index)


def _admission_mistake(
    admitted: Any, request: Request, num_running: int, budget: int
) -> str | None:
    if not isinstance(admitted, bool | np.bool_):
        return f"True or False, not {admitted!r}"
    return None if admitted or num_running else "True if no request is running"


def _order_mistake(first: Any, *counts: int) -> str | None:
    return None if isinstance(first, bool | np.bool_) else f"True or False, not {first!r}"


QUEUE_METHODS: dict[str, Callable[..., str | None]] = {
    "key": user_classes.finite_number_mistake,
    "preemption_key": user_classes.finite_number_mistake,
    "admits": _admission_mistake,
    "prefills_first": _order_mistake,
}


@dataclass(frozen=True, slots=True)
class Policies:
    """What the options of ``engine.scheduler`` select; the functions have the options bound."""

    options: Scheduler
    phase_order: Callable[[Phase | None], Phases]
    split: bool  # whether a step has chunks of one phase only
    may_admit: Callable[[int, int], bool]
    prefill_budget: Callable[[int], int]
    chunk_cap: Callable[[int], int | None]
    reservation: Callable[[RequestState, int], tuple[int, float]]
    queue: QueuePolicy


def select(options: Scheduler) -> Policies:
    """Return the policies of a config, or raise ``EngineError``; see ``QueuePolicy``."""
    watermark = DEFAULT_WATERMARK if options.watermark is None else options.watermark
    cap_chunk, reserve = CHUNK_CAPS[options.chunk_policy], RESERVATIONS[options.reservation]
    return Policies(
        options,
        PHASE_ORDERS[options.order, options.composition],
        options.composition is Composition.split,
        ADMISSIONS[options.admission],
        lambda left: prefill_budget(left, options.prefill_cap, options.prefill_floor),
        lambda num_decodes: cap_chunk(options.chunk, num_decodes),
        lambda state, num_running: reserve(state, num_running, watermark),
        QueuePolicy(options.queue, options.order),
    )


def count_decisions(counts: Counters, policies: Policies, step: StepBuilder) -> None:
    """Add to ``<option>.<value>`` how often the choice of each option made a difference."""
    options, share = policies.options, step.prefill_share
    if step.phases_compete:
        if policies.queue.prefills_first is None:
            counts.add(f"order.{options.order.value}")
        counts.add(f"composition.{options.composition.value}")
    if step.num_admitted:
        counts.add(f"admission.{options.admission.value}", step.num_admitted)
        counts.add(f"reservation.{options.reservation.value}", step.num_admitted)
        counts.record_peak("requests.most_running", step.most_running)
    if step.num_by_queue:
        counts.add(f"queue.{policies.queue.name}", step.num_by_queue)
    if step.num_capped:
        counts.add(f"chunk.{options.chunk_policy.value}", step.num_capped)
    if share.spent == share.budget < share.left:
        counts.add("steps.prefill_capped")
    if share.spent > share.left:
        counts.add("steps.prefill_floored")
    if step.is_full:
        counts.add("steps.full")
