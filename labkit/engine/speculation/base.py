"""Who drafts tokens, and which drafts are kept.

A draft is kept iff it is the very token that the request draws there: its row is sampled by
the request's own parameters and its own random number for the position. For a draft that is
one guess, not a distribution, this is rejection sampling (Leviathan et al. 2023, Chen et al.
2023): a guess d is kept with the target's p(d), and else a token is drawn from p without d.
What is more, the tokens are those of no speculation, greedy or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from labkit.engine.request import RequestState
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput


class Speculation(Protocol):
    """Adds drafts to a step before it is built, and judges them by what was sampled."""

    name: str

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that may be given at most ``limit`` drafts (1 or more)."""

    state: RequestState
    limit: int


class Proposer(Protocol):
    """Guesses what comes next; a wrong guess costs time and nothing else."""

    name: str

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """Return up to ``limit`` tokens for each request, in order; () where it has no guess."""


class NoSpeculation:
    """Drafts nothing."""

    name = "none"

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step as it is."""
        return output

    def accept(
        self, output: SchedulerOutput, drawn: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Give each sampling request its one token."""
        sampling = (chunk for chunk in output.chunks if chunk.samples)
        return {
            chunk.state.request_id: (token,) for chunk, token in zip(sampling, drawn, strict=True)
        }
