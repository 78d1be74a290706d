"""What a step computes: the scheduler's decision, before any tensor is built."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.engine.request import RequestState


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """``num_tokens`` further tokens of one request, from ``start`` on.

    ``samples`` says whether the chunk reaches the last known token: only then is there a
    next token to sample.
    """

    state: RequestState
    start: int
    num_tokens: int

    def __post_init__(self) -> None:
        """Refuse an empty chunk and one beyond the tokens known."""
        if self.num_tokens < 1 or self.start + self.num_tokens > self.state.num_tokens:
            raise ValueError(
                f"request {self.state.request_id}: tokens {self.start} to "
                f"{self.start + self.num_tokens} of {self.state.num_tokens} cannot be scheduled"
            )

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the chunk."""
        return self.start + self.num_tokens == self.state.num_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether the request still catches up with its tokens (a shape, not a state)."""
        return self.start < self.state.num_caught_up


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The chunks of one step, decodes first."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def total_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    def __bool__(self) -> bool:
        """Tell whether there is anything to compute."""
        return bool(self.chunks)
