"""Turns with clocks: requests served again after the measurement, to see where the time goes.

These turns decide nothing. They serve the measured requests in the same order until they have
``MIN_TOKENS`` output tokens or a quarter of all, whichever is more, so that a long run takes at
most a quarter longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.workload.requests.load_generator import LoadGenerator

if TYPE_CHECKING:
    from labkit.engine.runner.step_clocks import StepClocks

MIN_TOKENS, SHARE = 1024, 4


@dataclass(frozen=True, slots=True)
class ClockedServing:
    """Requests of one arm, served with clocks. ``max_tokens``: output tokens of all requests."""

    clocks: StepClocks
    generator: LoadGenerator
    max_tokens: int

    @property
    def tokens(self) -> int:
        """The output tokens so far."""
        return sum(len(step.receivers) for step in self.generator.steps)

    @property
    def done(self) -> bool:
        """Whether every request has ended, or enough tokens were computed."""
        limit = max(self.max_tokens // SHARE, min(self.max_tokens, MIN_TOKENS))
        return self.generator.done or self.tokens >= limit

    def note(self) -> dict[str, Any]:
        """Return the note ``step_parts``."""
        return {**self.clocks.report(), "output_tokens": self.tokens}
