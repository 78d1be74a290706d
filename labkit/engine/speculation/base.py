"""Who drafts tokens and which drafts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput


class Speculation(Protocol):
    """Adds drafts to a step before it is built, and judges them by what was sampled."""

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with drafts on its decodes."""

    def accept(
        self, output: SchedulerOutput, drawn: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Return every sampling request's tokens.

        Parameters
        ----------
        output
            The step, drafts included.
        drawn
            A token per row of logits, in their order: for each chunk that samples, the row
            of its last token and those of its drafts.
        """
