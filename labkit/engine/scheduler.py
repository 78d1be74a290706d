"""The scheduler: the one state machine of the engine.

Invariants, each pinned by a test:

- A request has no prefill or decode state: ``num_computed_tokens`` catches up with the
  tokens known, and a chunk samples iff it reaches the last of them.
- A request holds blocks for every token that a step computes for it. One that can get none
  sends the last in line back to the queue, where it waits with its tokens kept.
- Finish, abort and preempt share one release path; a result for a request that no longer
  runs is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from functools import partial

from labkit import config
from labkit.engine import policies
from labkit.engine.base import EngineError, FinishReason, TokenEvent
from labkit.engine.kv_layout.kv_cache import KVCache
from labkit.engine.policies import Phase
from labkit.engine.request import Request, RequestState, RequestStatus
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput
from labkit.engine.stats import Counters
from labkit.engine.step_plan import StepPlan


class Scheduler:
    """Moves requests through their one state machine; what to prefer, strategies say.

    Parameters
    ----------
    options
        The strategies, and caps: requests at once, tokens per step and per chunk.
    cache
        Where KV memory is reserved and released.
    eos_token_ids
        Ids that end a request which does not ignore them.
    """

    def __init__(
        self, options: config.Scheduler, cache: KVCache, eos_token_ids: frozenset[int]
    ) -> None:
        self._options = options
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._live: dict[str, RequestState] = {}
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._admission = policies.admission(options)
        self._order = policies.order(options)
        self._composition = policies.composition(options)
        self._chunking = policies.chunking(options)
        self._reservation = policies.reservation(options)
        self._queue = policies.queue(options)
        self._last: Phase | None = None
        self._serial = 0
        self.counts = Counters()

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running requests whose keys and values are computed."""
        return sum(state.num_computed_tokens for state in self._running)

    def is_running(self, request_id: str) -> bool:
        """Tell whether a request of this id has been admitted and has not ended."""
        state = self._live.get(request_id)
        return state is not None and state.status is RequestStatus.running

    def has_work(self) -> bool:
        """Tell whether any request is live."""
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Tell whether a request of this id is waiting or running."""
        return request_id in self._live

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        EngineError
            The id is live already, or it needs more KV memory than there is.
        """
        state = RequestState(request, self._serial)
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id}: this id is live already")
        reason = self._cache.refusal(state.max_cached_tokens)
        if reason is not None:
            raise EngineError(
                f"request {state.request_id}: {state.num_prompt_tokens} prompt tokens and "
                f"max_tokens={state.request.params.max_tokens} {reason}; raise the budget "
                "(engine.budget)"
            )
        self._live[request.request_id] = state
        self._serial += 1
        insort(self._waiting, state, key=self._queue.key)
        self.counts.add("requests.submitted")

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        state = self._live.get(request_id)
        if state is not None:
            self._end(state)
            self.counts.add("requests.aborted")

    def preempt(self, request_id: str) -> None:
        """Send a running request back to the queue; its tokens stay, to be computed again.

        Ids that do not run are ignored.
        """
        state = self._live.get(request_id)
        if state is None or state.status is not RequestStatus.running:
            return
        self._release(state)
        state.status = RequestStatus.waiting
        state.num_once_computed = max(state.num_once_computed, state.num_scheduled_tokens)
        state.num_computed_tokens = state.num_in_flight_tokens = state.num_unknown_tokens = 0
        state.num_preemptions += 1
        insort(self._waiting, state, key=self._queue.key)
        self.counts.add("preemptions")

    def _end(self, state: RequestState) -> None:
        """Finish or abort a live request."""
        self._release(state)
        state.status = RequestStatus.finished
        del self._live[state.request_id]

    def _release(self, state: RequestState) -> None:
        """Take a live request out of its list and free what it holds: the only way to leave."""
        running = state.status is RequestStatus.running
        (self._running if running else self._waiting).remove(state)
        self._cache.release(state.request_id)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's chunks: phase by phase, as order and composition say."""
        plan = StepPlan(self._options.max_num_batched_tokens, self._running)
        self._composition.compose(self._order, self._last, partial(self._fill, plan))
        self._last = plan.only_phase
        if plan.contended:
            self.counts.add(f"order.{self._order.name}")
            self.counts.add(f"composition.{self._composition.name}")
        if not plan.budget:
            self.counts.add("steps.full")
        return self._launch(plan.output())

    def _launch(self, output: SchedulerOutput) -> SchedulerOutput:
        """Count a step's tokens as in flight until ``update`` records its results."""
        for chunk in output.chunks:
            chunk.state.num_in_flight_tokens += chunk.num_tokens
            chunk.state.num_unknown_tokens += chunk.samples
        return output

    def _fill(self, plan: StepPlan, phase: Phase) -> int:
        """Schedule all of a phase that the step has room for; return the tokens."""
        before, chunks = plan.budget, plan.chunks[phase]
        cap = self._chunking.cap(len(plan.work[Phase.decode]))
        for state in plan.work[phase]:
            if state.status is RequestStatus.running:
                self._take(plan, chunks, state, cap)
        if phase is Phase.prefill:
            while self._admission.open(plan.num_running, plan.budget) and self._admit():
                plan.work[phase].append(self._running[-1])
                self._take(plan, chunks, self._running[-1], cap)
        return before - plan.budget

    def _take(
        self, plan: StepPlan, chunks: list[ScheduledChunk], state: RequestState, cap: int | None
    ) -> None:
        """Schedule as many of a request's tokens as budget, chunk cap and memory allow."""
        pending = state.num_pending_tokens
        if cap is not None and cap < min(pending, plan.budget):
            pending = cap
            self.counts.add(f"chunk.{self._chunking.name}")
        start, count = state.num_scheduled_tokens, min(pending, plan.budget)
        if count > 0 and self._hold(plan, state, start + count):
            plan.add(chunks, ScheduledChunk(state, start, count))

    def _hold(self, plan: StepPlan, state: RequestState, num_tokens: int) -> bool:
        """Get memory for a running request, preempting the last in line until there is enough.

        The first in line is never preempted, and fits the pool alone: it always advances,
        so steps are bounded.
        """
        if num_tokens <= state.num_held_tokens:
            return True
        while not self._cache.grow(state.request_id, num_tokens):
            victim = max(self._running, key=self._queue.key)
            self.preempt(victim.request_id)
            plan.drop(victim)
            if victim is state:
                return False
        state.num_held_tokens = num_tokens
        return True

    def _admit(self) -> bool:
        """Let the first waiting request run if a place and the blocks asked for are free."""
        if not self._waiting or len(self._running) >= self._options.max_num_seqs:
            return False
        state = self._waiting[0]
        spare, tokens = self._reservation.spare(len(self._running)), self._reservation.tokens(state)
        cached = self._cache.reserve(state, tokens, spare)
        if cached is None:
            return False
        del self._waiting[0]
        state.num_computed_tokens, state.num_held_tokens = cached, tokens
        state.status = RequestStatus.running
        self._running.append(state)
        self.counts.at_least("requests.most_running", len(self._running))
        self.counts.add(f"admission.{self._admission.name}")
        self.counts.add(f"reservation.{self._reservation.name}")
        if self._queue.overtakes(state, self._waiting):
            self.counts.add(f"queue.{self._queue.name}")
        return True

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[Sampled]]
    ) -> list[TokenEvent]:
        """Record a step's results: advance, publish, append, stop, free.

        Parameters
        ----------
        output
            What ``schedule`` returned for the step, drafts added.
        sampled
            The tokens of every request whose chunk samples, by request id: one, and one
            more for each draft that was right.
        """
        events = []
        for chunk in output.chunks:
            state = chunk.state
            if state.status is not RequestStatus.running or chunk.outdated:
                continue
            state.num_in_flight_tokens -= chunk.num_tokens
            state.num_computed_tokens = chunk.start + chunk.num_tokens
            if chunk.start < state.num_once_computed:
                again = min(state.num_computed_tokens, state.num_once_computed) - chunk.start
                self.counts.add("tokens.recomputed", again)
            self._cache.publish(state)
            if not chunk.samples:
                continue
            state.num_unknown_tokens -= 1
            results = sampled[state.request_id]
            state.num_computed_tokens += len(results) - 1
            events += self._append(state, results)
        return events

    def _append(self, state: RequestState, results: Sequence[Sampled]) -> list[TokenEvent]:
        """Give a request its new tokens up to the one that ends it."""
        events = []
        for result in results:
            state.token_ids.append(result.token)
            reason = self._finish_reason(state)
            events.append(
                TokenEvent(
                    state.request_id, result.token, reason, result.margin, logprobs=result.logprobs
                )
            )
            if reason is not None:
                self._end(state)
                self.counts.add("requests.finished")
                break
        return events

    def _finish_reason(self, state: RequestState) -> FinishReason | None:
        params, token = state.request.params, state.token_ids[-1]
        if token in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token in self._eos_token_ids:
            return "stop"
        return "length" if state.num_output_tokens >= params.max_tokens else None

    def close(self) -> None:
        """Abort every live request."""
        for request_id in list(self._live):
            self.abort(request_id)

    def check(self) -> None:
        """Raise ``AssertionError`` unless lists, statuses and blocks agree."""
        running = {state.request_id for state in self._running}
        waiting = {state.request_id for state in self._waiting}
        if running & waiting or running | waiting != set(self._live):
            raise AssertionError("a live request is not in exactly one list")
        if len(running) > self._options.max_num_seqs:
            raise AssertionError("more requests run than max_num_seqs")
        for state in self._running:
            if not 0 <= state.num_computed_tokens < state.num_tokens:
                raise AssertionError(f"request {state.request_id} has nothing left to compute")
        self._cache.check(running)
