"""What a schedule decides: which tokens of which requests a step computes, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from labkit.engine.request import RequestState


class Phase(IntEnum):
    """The two kinds of work in a step: decode (one token per request) and prefill."""

    decode = 0
    prefill = 1


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens ``[start, start + num_tokens)`` of one request.

    ``samples`` is true if the chunk reaches the request's last token: only then is a next token
    sampled. ``preemption_count`` is the request's number of preemptions at the time of scheduling.
    """

    state: RequestState
    start: int
    num_tokens: int
    samples: bool = field(init=False)
    preemption_count: int = field(init=False)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an empty chunk, or one that exceeds the request's tokens."""
        state, stop = self.state, self.start + self.num_tokens
        num_tokens = len(state.token_ids) + state.num_output_placeholders
        if self.num_tokens < 1 or stop > num_tokens:
            raise ValueError(
                f"request {state.request_id}: tokens {self.start} to {stop} of {num_tokens} "
                "cannot be scheduled"
            )
        object.__setattr__(self, "samples", stop == num_tokens)
        object.__setattr__(self, "preemption_count", state.num_preemptions)

    @property
    def scored_rows(self) -> range:
        """The prompt rows of the chunk whose log probabilities the request wants.

        Row i gives the log probabilities of prompt token i + 1. Rows recorded before a preemption
        are left out.
        """
        state = self.state
        if state.request.params.prompt_logprobs is None:
            return range(0)
        stop = min(self.start + self.num_tokens, state.num_prompt_tokens - 1)
        return range(max(self.start, state.num_scored_rows), stop)

    @property
    def is_outdated(self) -> bool:
        """Whether the request was preempted after the chunk was scheduled (results are dropped)."""
        return self.preemption_count != self.state.num_preemptions

    @property
    def num_recomputed(self) -> int:
        """How many of the chunk's tokens had been computed before a preemption."""
        before = self.state.num_computed_before_preemption - self.start
        return max(0, min(before, self.num_tokens))

    @property
    def is_prefill(self) -> bool:
        """Whether the chunk starts in the prompt, or in tokens that a preemption discarded."""
        return self.start < self.state.num_prefill_tokens


class SchedulerOutput(NamedTuple):
    """The chunks of one step, decodes first.

    ``drafts`` has the draft tokens by request id. A request's draft tokens follow a chunk that
    samples, and are computed with the chunk. A draft token is accepted if it equals the token that
    is sampled for its position.
    """

    chunks: tuple[ScheduledChunk, ...]
    drafts: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @property
    def total_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks) + sum(map(len, self.drafts.values()))

    @property
    def is_decode_only(self) -> bool:
        """Whether every chunk is a decode of one token, without drafts."""
        if self.drafts:
            return False
        for chunk in self.chunks:  # faster than ``all``: it matters in a step of one request
            if chunk.num_tokens != 1 or not chunk.samples:
                return False
            if chunk.start < chunk.state.num_prompt_tokens:
                return False
        return True

    def __bool__(self) -> bool:
        return bool(self.chunks)


class PrefillShare(NamedTuple):
    """The tokens that prompts could get in a step, those they may have, and those they got."""

    left: int  # what the other phase left of the step's budget
    budget: int  # ``left`` within ``engine.scheduler.prefill_cap`` and ``prefill_floor``
    spent: int


class StepBuilder:
    """A step under construction by the scheduler.

    ``token_budget`` is ``engine.scheduler.max_num_batched_tokens``, ``num_tokens`` the tokens
    scheduled so far. ``pending`` has, by phase, the running requests with tokens to compute, in
    the order in which they are served. ``chunks`` has, by phase, the chunks scheduled so far.
    ``num_running`` is the number of requests that were running when the step began. The others say
    where a policy made a difference: ``num_admitted`` requests, ``most_running`` of them after any
    admission, ``num_by_queue`` decisions that the order of arrival would not have made,
    ``num_capped`` chunks that ``chunk_policy`` made smaller, and the ``prefill_share``.
    """

    def __init__(self, token_budget: int, running: Iterable[RequestState]) -> None:
        self.token_budget = token_budget
        self.num_tokens = self.num_running = 0
        self.num_capped = self.num_admitted = self.num_by_queue = self.most_running = 0
        self.prefill_share = PrefillShare(0, 0, 0)
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in running:
            self.num_running += 1
            if state.is_prefill:
                prefills.append(state)
            elif state.num_pending_tokens:  # otherwise the request's last token is in flight
                decodes.append(state)
        self.pending = [decodes, prefills]
        self.chunks: tuple[list[ScheduledChunk], list[ScheduledChunk]] = [], []

    @property
    def phases_compete(self) -> bool:
        """Whether decodes and prefills had work, so that order and composition matter."""
        return all(self.pending)

    @property
    def is_full(self) -> bool:
        """Whether the step has all tokens that ``max_num_batched_tokens`` allows."""
        return self.num_tokens >= self.token_budget

    @property
    def only_phase(self) -> Phase | None:
        """The phase that all chunks have, or None if the step is mixed or empty."""
        decodes, prefills = self.chunks
        if bool(decodes) is bool(prefills):
            return None
        return Phase.decode if decodes else Phase.prefill

    @property
    def num_scored_rows(self) -> int:
        return sum(len(chunk.scored_rows) for chunks in self.chunks for chunk in chunks)

    def remove(self, state: RequestState) -> None:
        """Remove a preempted request and its chunks, whose tokens return to the budget."""
        for phase in Phase:
            chunks = self.chunks[phase]
            self.pending[phase] = [other for other in self.pending[phase] if other is not state]
            self.num_tokens -= sum(chunk.num_tokens for chunk in chunks if chunk.state is state)
            chunks[:] = [chunk for chunk in chunks if chunk.state is not state]

    def admit(self, state: RequestState, num_running: int, *, overtakes: bool) -> None:
        """Add an admitted request. ``overtakes``: a request that arrived earlier still waits."""
        self.pending[Phase.prefill].append(state)
        self.num_admitted += 1
        self.num_by_queue += overtakes
        self.most_running = max(self.most_running, num_running)

    def finish(self) -> SchedulerOutput:
        """Return the step's chunks, decodes first. They are in flight from now on."""
        output = SchedulerOutput((*self.chunks[Phase.decode], *self.chunks[Phase.prefill]))
        for chunk in output.chunks:
            chunk.state.num_in_flight_tokens += chunk.num_tokens
            chunk.state.num_output_placeholders += chunk.samples
        return output
