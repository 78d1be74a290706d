"""Turns with clocks: requests served again after the measurement, to see where the time goes.

These turns decide nothing. They serve the measured requests in the same order until they have
``MIN_TOKENS`` output tokens or a quarter of all, whichever is more, so that a long run takes at
most a quarter longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.config import PRESET_LAYOUTS, Experiment

if TYPE_CHECKING:
    from labkit.engine.runner.step_clocks import StepClocks
    from labkit.workload.requests.load_generator import LoadGenerator

MIN_TOKENS, SHARE = 1024, 4


def share(experiment: Experiment, max_tokens: int) -> float:
    """Return which share of the requests' tokens an experiment serves again with clocks."""
    engine = experiment.engine
    if engine.name not in PRESET_LAYOUTS or engine.parallel.size > 1:
        return 0.0
    return limit(max_tokens) / max_tokens


def limit(max_tokens: int) -> int:
    """Return how many output tokens the turns with clocks have, of ``max_tokens``."""
    return max(max_tokens // SHARE, min(max_tokens, MIN_TOKENS))


@dataclass(frozen=True, slots=True)
class ClockedServing:
    """Requests of one arm, served with clocks. ``max_tokens``: output tokens of all requests."""

    clocks: StepClocks
    generator: LoadGenerator
    max_tokens: int

    @property
    def tokens(self) -> int:
        return sum(len(step.receivers) for step in self.generator.steps)

    @property
    def done(self) -> bool:
        return self.generator.done or self.tokens >= limit(self.max_tokens)

    def note(self) -> dict[str, Any]:
        return {**self.clocks.report(), "output_tokens": self.tokens}
