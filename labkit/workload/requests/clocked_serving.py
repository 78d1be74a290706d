"""Turns with clocks: requests served again after the measurement, to see where the time goes.

These turns decide nothing. They serve the measured requests in the same order until they have
``MIN_TOKENS`` output tokens or a quarter of all, whichever is more, so that a long run takes at
most a quarter longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.workload.requests.load_generator import Clock, LoadGenerator, Wait

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import InferenceEngine
    from labkit.engine.runner.step_clocks import StepClocks

MIN_TOKENS, SHARE = 1024, 4


class ClockedServing:
    """Requests of one arm, served with clocks. ``max_tokens``: output tokens of all requests.

    ``drive`` returns the load generator for an engine and a function that waits.
    """

    def __init__(
        self,
        clocks: StepClocks,
        engine: InferenceEngine,
        clock: Clock,
        wait: Wait,
        max_tokens: int,
        drive: Callable[[InferenceEngine, Wait], LoadGenerator],
    ) -> None:
        from labkit.engine.runner.step_clocks import ClockedEngine

        self._clocks = clocks
        clocked: Any = ClockedEngine(engine, clocks, clock)
        self.generator = drive(clocked, clocked.waits(wait))
        self._limit = max(max_tokens // SHARE, min(max_tokens, MIN_TOKENS))

    @property
    def tokens(self) -> int:
        """The output tokens so far."""
        return sum(len(step.receivers) for step in self.generator.steps)

    @property
    def done(self) -> bool:
        """Whether every request has ended, or enough tokens were computed."""
        return self.generator.done or self.tokens >= self._limit

    def note(self) -> dict[str, Any]:
        """Return the note ``step_parts``."""
        return {**self._clocks.report(), "output_tokens": self.tokens}
