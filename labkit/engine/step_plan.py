"""A step while it is being filled: the budget left and the chunks chosen so far."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.engine.policies import Phase
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput


class StepPlan:
    """What the running requests could compute, and what of it fits into the step.

    Parameters
    ----------
    budget
        Tokens that the step may compute.
    running
        The running requests, in the order in which they are served.
    """

    __slots__ = ("budget", "chunks", "num_running", "work")

    def __init__(self, budget: int, running: Iterable[RequestState]) -> None:
        self.budget = budget
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        self.num_running = 0
        for state in running:
            self.num_running += 1
            if state.catching_up:
                prefills.append(state)
            elif state.num_pending_tokens:  # else its last token is in flight
                decodes.append(state)
        self.work = {Phase.decode: decodes, Phase.prefill: prefills}
        self.chunks: dict[Phase, list[ScheduledChunk]] = {Phase.decode: [], Phase.prefill: []}

    @property
    def contended(self) -> bool:
        """Whether both phases have something to compute, so that order and composition count."""
        return all(self.work.values())

    @property
    def only_phase(self) -> Phase | None:
        """The phase that has the step to itself; None: both, or the step is empty."""
        filled = [phase for phase, chunks in self.chunks.items() if chunks]
        return filled[0] if len(filled) == 1 else None

    def add(self, chunks: list[ScheduledChunk], chunk: ScheduledChunk) -> None:
        """Add a chunk to those of its phase."""
        chunks.append(chunk)
        self.budget -= chunk.num_tokens

    def drop(self, state: RequestState) -> None:
        """Forget a preempted request: what it would have computed is free for others."""
        for phase in Phase:
            work, chunks = self.work[phase], self.chunks[phase]
            self.work[phase] = [other for other in work if other is not state]
            self.budget += sum(chunk.num_tokens for chunk in chunks if chunk.state is state)
            chunks[:] = [chunk for chunk in chunks if chunk.state is not state]

    def output(self) -> SchedulerOutput:
        """Return the chunks, decodes first."""
        return SchedulerOutput((*self.chunks[Phase.decode], *self.chunks[Phase.prefill]))
