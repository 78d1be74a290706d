"""A step under construction, what the policies decided in it, and the counters of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from labkit.engine.engine_protocol import Counters
from labkit.engine.request import RequestState
from labkit.engine.scheduler.scheduler_output import Phase, ScheduledChunk, SchedulerOutput
from labkit.engine.scheduler.scheduling_policies import Policies


class PrefillShare(NamedTuple):
    """The tokens that prompts could get in a step, those they may have, and those they got."""

    left: int  # what the other phase left of the step's budget
    budget: int  # ``left`` within ``engine.scheduler.prefill_cap`` and ``prefill_floor``
    spent: int


NO_SHARE = PrefillShare(0, 0, 0)


@dataclass(frozen=True, slots=True)
class ScheduleDecisions:
    """Where the policies of ``engine.scheduler`` made a difference in a step."""

    phases_compete: bool = False  # decodes and prefills had work, so order and composition matter
    is_full: bool = False  # the step has all tokens that ``max_num_batched_tokens`` allows
    num_admitted: int = 0
    num_overtaking: int = 0  # of these, those admitted before a request that arrived earlier
    most_running: int = 0  # after any admission
    num_capped: int = 0  # chunks that ``chunk_policy`` made smaller
    prefill_share: PrefillShare = NO_SHARE


NO_DECISIONS = ScheduleDecisions()


def count_decisions(counts: Counters, policies: Policies, decided: ScheduleDecisions) -> None:
    """Add to ``<option>.<value>`` how often the choice of each option made a difference."""
    options, share = policies.options, decided.prefill_share
    if decided.phases_compete:
        counts.add(f"order.{options.order.value}")
        counts.add(f"composition.{options.composition.value}")
    if decided.num_admitted:
        counts.add(f"admission.{options.admission.value}", decided.num_admitted)
        counts.add(f"reservation.{options.reservation.value}", decided.num_admitted)
        counts.record_peak("requests.most_running", decided.most_running)
    if decided.num_overtaking:
        counts.add(f"queue.{policies.queue.name}", decided.num_overtaking)
    if decided.num_capped:
        counts.add(f"chunk.{options.chunk_policy.value}", decided.num_capped)
    if share.spent == share.budget < share.left:
        counts.add("steps.prefill_capped")
    if share.spent > share.left:
        counts.add("steps.prefill_floored")
    if decided.is_full:
        counts.add("steps.full")


class StepBuilder:
    """A step under construction by the scheduler.

    ``token_budget`` is ``engine.scheduler.max_num_batched_tokens``, ``num_tokens`` the tokens
    scheduled so far. ``pending`` has, by phase, the running requests with tokens to compute, in
    the order in which they are served. ``chunks`` has, by phase, the chunks scheduled so far.
    ``num_running`` is the number of requests that were running when the step began. The other
    attributes become ``ScheduleDecisions``.
    """

    def __init__(self, token_budget: int, running: Iterable[RequestState]) -> None:
        self.token_budget = token_budget
        self.num_tokens = self.num_running = 0
        self.num_capped = self.num_admitted = self.num_overtaking = self.most_running = 0
        self.prefill_share = NO_SHARE
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in running:
            self.num_running += 1
            if state.is_prefill:
                prefills.append(state)
            elif state.num_pending_tokens:  # otherwise the request's last token is in flight
                decodes.append(state)
        self.pending = [decodes, prefills]
        self.chunks: tuple[list[ScheduledChunk], list[ScheduledChunk]] = [], []

    @property
    def only_phase(self) -> Phase | None:
        """The phase that all chunks have, or None if the step is mixed or empty."""
        decodes, prefills = self.chunks
        if bool(decodes) is bool(prefills):
            return None
        return Phase.decode if decodes else Phase.prefill

    @property
    def num_scored_rows(self) -> int:
        """Prompt rows scored by the chunks scheduled so far."""
        return sum(len(chunk.scored_rows) for chunks in self.chunks for chunk in chunks)

    def remove(self, state: RequestState) -> None:
        """Remove a preempted request and its chunks, whose tokens return to the budget."""
        for phase in Phase:
            chunks = self.chunks[phase]
            self.pending[phase] = [other for other in self.pending[phase] if other is not state]
            self.num_tokens -= sum(chunk.num_tokens for chunk in chunks if chunk.state is state)
            chunks[:] = [chunk for chunk in chunks if chunk.state is not state]

    def admit(self, state: RequestState, num_running: int, *, overtakes: bool) -> None:
        """Add an admitted request, which is one of ``num_running`` now, to those with a prompt.

        ``overtakes``: a request that arrived earlier still waits.
        """
        self.pending[Phase.prefill].append(state)
        self.num_admitted += 1
        self.num_overtaking += overtakes
        self.most_running = max(self.most_running, num_running)

    def decisions(self) -> ScheduleDecisions:
        """Return what the policies decided so far."""
        decodes, prefills = self.pending
        full = self.num_tokens >= self.token_budget
        if self.prefill_share is NO_SHARE and not (prefills or full):
            return NO_DECISIONS  # the usual step of decodes
        return ScheduleDecisions(
            phases_compete=bool(decodes and prefills),
            is_full=full,
            num_admitted=self.num_admitted,
            num_overtaking=self.num_overtaking,
            most_running=self.most_running,
            num_capped=self.num_capped,
            prefill_share=self.prefill_share,
        )

    def launch(self) -> SchedulerOutput:
        """Return the step's chunks, decodes first. They are in flight from now on."""
        output = SchedulerOutput((*self.chunks[Phase.decode], *self.chunks[Phase.prefill]))
        for chunk in output.chunks:
            chunk.state.num_in_flight_tokens += chunk.num_tokens
            chunk.state.num_output_placeholders += chunk.samples
        return output
