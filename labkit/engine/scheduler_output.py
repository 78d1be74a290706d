"""What a step computes: the scheduler's decision, before any tensor is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from labkit.engine.request import RequestState


class Phase(IntEnum):
    """What a part of a step does: one more token each, or tokens to catch up with."""

    decode = 0
    prefill = 1


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """``num_tokens`` further tokens of one request, from ``start`` on.

    ``samples`` says whether the chunk reaches the request's last token: only then is there
    a next one to sample.
    """

    state: RequestState
    start: int
    num_tokens: int
    samples: bool = field(init=False)
    life: int = field(init=False)

    def __post_init__(self) -> None:
        """Refuse an empty chunk and one beyond the request's tokens."""
        state = self.state
        stop, last = self.start + self.num_tokens, len(state.token_ids) + state.num_unknown_tokens
        if self.num_tokens < 1 or stop > last:
            raise ValueError(
                f"request {state.request_id}: tokens {self.start} to {stop} of {last} cannot be "
                "scheduled"
            )
        object.__setattr__(self, "samples", stop == last)
        object.__setattr__(self, "life", state.num_preemptions)

    @property
    def outdated(self) -> bool:
        """Whether the request was preempted since: what was computed is lost."""
        return self.life != self.state.num_preemptions

    @property
    def is_prefill(self) -> bool:
        """Whether the request still catches up with its tokens (a shape, not a state)."""
        return self.start < self.state.num_caught_up


class SchedulerOutput(NamedTuple):
    """The chunks of one step, decodes first.

    ``drafts``: by request id, guesses at what comes after the last token of a chunk that
    samples; they are computed with it, and kept as far as sampling agrees.
    """

    chunks: tuple[ScheduledChunk, ...]
    drafts: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @property
    def total_tokens(self) -> int:
        """Tokens computed in the step, drafts included."""
        return sum(chunk.num_tokens for chunk in self.chunks) + sum(map(len, self.drafts.values()))

    @property
    def decodes(self) -> bool:
        """Whether each chunk is the one token of a request that is not yet computed."""
        if self.drafts:
            return False
        for chunk in self.chunks:  # faster than ``all``, which a step of one request would notice
            if chunk.num_tokens != 1 or not chunk.samples:
                return False
            if chunk.start < chunk.state.num_prompt_tokens:
                return False
        return True

    def __bool__(self) -> bool:
        """Tell whether there is anything to compute."""
        return bool(self.chunks)


class StepBuilder:
    """A step while it is being filled: what the running requests could compute, and what fits.

    ``budget``: tokens that are left. ``work``: the requests with something to compute, in the
    order in which they are served. ``num_running``: how many ran when the step began.
    """

    __slots__ = ("budget", "chunks", "num_running", "work")

    def __init__(self, budget: int, running: Iterable[RequestState]) -> None:
        self.budget = budget
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        self.num_running = 0
        for state in running:
            self.num_running += 1
            if state.catching_up:
                prefills.append(state)
            elif state.num_pending_tokens:  # else its last token is in flight
                decodes.append(state)
        self.work = [decodes, prefills]  # by phase
        self.chunks: tuple[list[ScheduledChunk], list[ScheduledChunk]] = [], []

    @property
    def only_phase(self) -> Phase | None:
        """The phase that has the step to itself; None: both share it, or it is empty."""
        decodes, prefills = self.chunks
        if bool(decodes) is bool(prefills):
            return None
        return Phase.decode if decodes else Phase.prefill

    def drop(self, state: RequestState) -> None:
        """Forget a preempted request: what it would have computed is free for others."""
        for phase in Phase:
            work, chunks = self.work[phase], self.chunks[phase]
            self.work[phase] = [other for other in work if other is not state]
            self.budget += sum(chunk.num_tokens for chunk in chunks if chunk.state is state)
            chunks[:] = [chunk for chunk in chunks if chunk.state is not state]

    def output(self) -> SchedulerOutput:
        """Return the chunks, decodes first."""
        return SchedulerOutput((*self.chunks[Phase.decode], *self.chunks[Phase.prefill]))
