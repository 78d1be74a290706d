"""What a step computes: the scheduler's decision, before any tensor is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.engine.request import RequestState


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
        stop, last = self.start + self.num_tokens, state.num_tokens + state.num_unknown_tokens
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


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The chunks of one step, decodes first.

    ``drafts``: by request id, guesses at what comes after the last token of a chunk that
    samples; they are computed with it, and kept as far as sampling agrees.
    """

    chunks: tuple[ScheduledChunk, ...]
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in the step, drafts included."""
        return sum(chunk.num_tokens for chunk in self.chunks) + sum(map(len, self.drafts.values()))

    def __bool__(self) -> bool:
        """Tell whether there is anything to compute."""
        return bool(self.chunks)
