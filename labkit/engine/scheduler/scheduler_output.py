"""The scheduler's decision: which tokens of which requests a step computes."""

from __future__ import annotations

from collections.abc import Mapping
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
        """Tokens computed in the step, drafts included."""
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
        """Return whether the step has any chunk."""
        return bool(self.chunks)
