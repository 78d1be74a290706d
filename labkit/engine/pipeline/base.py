"""When a step's results are processed: the protocol, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from labkit.engine.input_builder import Batch
from labkit.engine.logits import Logits
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput

RunModel = Callable[[Batch], Logits]
# Starts a step; what it returns waits for the logits.
Launch = Callable[[Batch], Callable[[], Logits]]
Results = dict[str, Sequence[Sampled]]
Sample = Callable[[SchedulerOutput, Batch, Logits], Results]


@dataclass(frozen=True, slots=True)
class Done:
    """A step whose tokens are sampled: what ``Scheduler.update`` takes."""

    scheduled: SchedulerOutput
    sampled: Results


class Pipeline(Protocol):
    """Runs steps in the order of ``submit``; only one forward runs at a time."""

    name: str

    def submit(self, scheduled: SchedulerOutput, batch: Batch) -> Done | None:
        """Start a step; return the one whose results are to be processed now, if any."""

    def drain(self) -> Done | None:
        """Return the step in flight when it is done; None if there is none."""

    def discard(self) -> None:
        """Drop the step in flight when it is done: every request in it has ended."""

    def close(self) -> None:
        """Drop the step in flight and what the pipeline holds."""
