"""What the scheduler asks: small strategies that order, cap and admit, and own no request.

Each axis of ``engine.scheduler`` is a Protocol and a class per word; a class's ``name`` is
the word, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from labkit import config
from labkit.engine.request import RequestState


class Admission(Protocol):
    """When waiting requests may join."""

    name: str

    def open(self, num_running: int, budget: int) -> bool:
        """Tell whether another waiting request may join.

        ``num_running`` were running when the step began; ``budget`` tokens are left in it.
        """


class Continuous:
    """Admits whenever tokens are left, so that blocks are not held before they are used."""

    name = "continuous"

    def open(self, num_running: int, budget: int) -> bool:
        return budget > 0


class StaticBatches:
    """Admits a whole batch into an empty running set, whatever the step's token budget.

    The next batch waits for the last request of this one to end.
    """

    name = "static"

    def open(self, num_running: int, budget: int) -> bool:
        return num_running == 0


class Chunking(Protocol):
    """How much of one prompt a step may compute, besides the step's own budget."""

    name: str

    def cap(self, num_decodes: int) -> int | None:
        """Return the cap in tokens, at least 1, beside so many decodes; None: no cap."""


class StaticChunk:
    """``chunk`` tokens of a request per step; None: no cap."""

    name = "static"

    def __init__(self, chunk: int | None) -> None:
        self._chunk = chunk

    def cap(self, num_decodes: int) -> int | None:
        return self._chunk


class ShrinkingChunk:
    """``chunk`` tokens less one for each decode, at least 1.

    A chunk and the decodes beside it are together ``chunk`` tokens, so that a step costs
    decoding requests the same however many they are: the leftover-after-decode budget of
    LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md, patch 0016), for each request.
    """

    name = "shrinking"

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def cap(self, num_decodes: int) -> int | None:
        return max(1, self._chunk - num_decodes)


class Reservation(Protocol):
    """What a request must find free to be admitted."""

    name: str

    def tokens(self, state: RequestState) -> int:
        """Return for how many tokens a request holds blocks when it is admitted."""

    def spare(self, num_running: int) -> float:
        """Return the share of the memory that an admission must leave free.

        0 where nothing runs: a request that fits the pool is then always admitted.
        """


class Full:
    """Blocks to the request's very end, however few will be used: nothing is ever preempted."""

    name = "full"

    def tokens(self, state: RequestState) -> int:
        return state.max_cached_tokens

    def spare(self, num_running: int) -> float:
        return 0.0


class Optimistic:
    """Blocks for the tokens known, the rest as they come.

    As in vLLM: a share ``watermark`` of the blocks stays free, so that the next admission is
    not preempted at once, and a request that runs out of blocks sends the last in line back
    to the queue.
    """

    name = "optimistic"

    def __init__(self, watermark: float) -> None:
        self._watermark = watermark

    def tokens(self, state: RequestState) -> int:
        return state.num_tokens

    def spare(self, num_running: int) -> float:
        return self._watermark if num_running else 0.0


class Queue(Protocol):
    """A total order of requests: the first waits least, the last is preempted first."""

    name: str

    def key(self, state: RequestState) -> tuple[int, int]:
        """Return a request's place: unique, fixed for its life, smaller is served earlier."""

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        """Tell whether a request is admitted before one that came earlier and still waits."""


class Fcfs:
    """In the order of arrival; a preempted request is thereby in front of all that wait."""

    name = "fcfs"

    def key(self, state: RequestState) -> tuple[int, int]:
        return 0, state.serial

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        return False


class Priority:
    """By the client's priority, the lower number first; equals in the order of arrival.

    A request is overtaken while it waits and preempted for others, as its number says.
    """

    name = "priority"

    def key(self, state: RequestState) -> tuple[int, int]:
        return state.request.priority, state.serial

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        return any(other.serial < state.serial for other in waiting)


class Phase(Enum):
    """What a part of a step does: one more token each, or tokens to catch up with."""

    decode = "decode"
    prefill = "prefill"


Phases = tuple[Phase, Phase]
DECODE_FIRST: Phases = (Phase.decode, Phase.prefill)
PREFILL_FIRST: Phases = (Phase.prefill, Phase.decode)


class Order(Protocol):
    """Whose tokens come first."""

    name: str

    def sharing(self) -> Phases:
        """Return who draws on the token budget first in a step that both share."""

    def turns(self, last: Phase | None) -> Phases:
        """Return who may have a whole step, by preference.

        ``last``: whose the last step was; None: both had a part, or there was none.
        """


class DecodeFirst:
    """Running requests never wait for a prompt that shares their step.

    With steps of their own, the two take turns. That bounds the wait of both: strict
    precedence of decodes would admit nobody until every running request has ended.
    """

    name = "decode_first"

    def sharing(self) -> Phases:
        return DECODE_FIRST

    def turns(self, last: Phase | None) -> Phases:
        return PREFILL_FIRST if last is Phase.decode else DECODE_FIRST


class PrefillFirst:
    """A new request's first token is never kept waiting by decodes."""

    name = "prefill_first"

    def sharing(self) -> Phases:
        return PREFILL_FIRST

    def turns(self, last: Phase | None) -> Phases:
        return PREFILL_FIRST


class Composition(Protocol):
    """Who shares a step."""

    name: str

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        """Fill a step.

        ``fill`` adds all tokens of a phase that the step has room for, and returns how many;
        ``last`` as in ``Order.turns``.
        """


class Mixed:
    """Decodes and prompt chunks share one forward pass: both phases fill every step."""

    name = "mixed"

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        for phase in order.sharing():
            fill(phase)


class Split:
    """The first phase with anything to compute has the step to itself.

    Prefill is kept out of decode steps, so that decodes keep their shape.
    """

    name = "split"

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        for phase in order.turns(last):
            if fill(phase):
                return


def admission(options: config.Scheduler) -> Admission:
    """Return the admission that the config names."""
    return Continuous() if options.admission is config.Admission.continuous else StaticBatches()


def chunking(options: config.Scheduler) -> Chunking:
    """Return the chunking that the config names; ValueError if there is no chunk to shrink."""
    if options.chunk_policy is config.ChunkPolicy.static:
        return StaticChunk(options.chunk)
    if options.chunk is None:
        raise ValueError("chunk_policy=shrinking without a chunk")
    return ShrinkingChunk(options.chunk)


def reservation(options: config.Scheduler) -> Reservation:
    """Return the reservation that the config names."""
    if options.reservation is config.Reservation.full:
        return Full()
    given = options.watermark
    return Optimistic(config.DEFAULT_WATERMARK if given is None else given)


def queue(options: config.Scheduler) -> Queue:
    """Return the queue that the config names."""
    return Fcfs() if options.queue is config.Queue.fcfs else Priority()


def order(options: config.Scheduler) -> Order:
    """Return the order that the config names."""
    return DecodeFirst() if options.order is config.Order.decode_first else PrefillFirst()


def composition(options: config.Scheduler) -> Composition:
    """Return the composition that the config names."""
    return Mixed() if options.composition is config.Composition.mixed else Split()
