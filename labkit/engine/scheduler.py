"""The scheduler: the one state machine of the engine.

Invariants, each pinned by a test:

- A request has no prefill or decode state: ``num_computed_tokens`` catches up with the
  tokens known, and a chunk samples iff it reaches the last of them.
- Every running request holds blocks for all the tokens it can ever compute (full
  reservation), so nothing is preempted and every running request advances.
- Finish and abort share one idempotent release path; a result for a request that is no
  longer live is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from labkit import config
from labkit.engine import admission, batching
from labkit.engine.base import EngineError, FinishReason, TokenEvent
from labkit.engine.batching import Phase
from labkit.engine.kv_layout.base import KVCache
from labkit.engine.request import Request, RequestState, RequestStatus
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput
from labkit.engine.stats import Counters
from labkit.engine.step_plan import StepPlan


class Scheduler:
    """First come, first served; order, composition and admission are strategies.

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
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._admission = admission.create(options.admission)
        self._order = batching.create_order(options.order)
        self._composition = batching.create_composition(options.composition)
        self._last: Phase | None = None
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
        """Queue a request, last.

        Raises
        ------
        EngineError
            The id is live already, or it needs more KV memory than there is.
        """
        state = RequestState(request)
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
        self._waiting.append(state)
        self.counts.add("requests.submitted")

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        state = self._live.get(request_id)
        if state is not None:
            self._release(state)
            self.counts.add("requests.aborted")

    def _release(self, state: RequestState) -> None:
        """Take a live request out of every list: the only way a request ends."""
        del self._live[state.request_id]
        if state.status is RequestStatus.running:
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        state.status = RequestStatus.finished
        self._cache.release(state.request_id)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's chunks: phase by phase, as order and composition say."""
        plan = StepPlan(self._options.max_num_batched_tokens, self._running)
        self._composition.compose(self._order, self._last, partial(self._fill, plan))
        self._last = plan.only_phase
        if plan.contended:
            self.counts.add(f"order.{self._order.name}")
            self.counts.add(f"composition.{self._composition.name}")
        return self._launch(plan.output())

    def _launch(self, output: SchedulerOutput) -> SchedulerOutput:
        """Count a step's tokens as in flight until ``update`` records its results."""
        for chunk in output.chunks:
            chunk.state.num_in_flight_tokens += chunk.num_tokens
            chunk.state.num_unknown_tokens += chunk.samples
        return output

    def _fill(self, plan: StepPlan, phase: Phase) -> int:
        """Schedule all of a phase that the step has room for; return the tokens."""
        before = plan.budget
        for state in plan.work[phase]:
            plan.take(state, phase, self._options.chunk)
        if phase is Phase.prefill:
            while self._admission.open(plan.num_running, plan.budget) and self._admit():
                plan.work[phase].append(self._running[-1])
                plan.take(self._running[-1], phase, self._options.chunk)
        return before - plan.budget

    def _admit(self) -> bool:
        """Let the first waiting request run if a place and all its blocks are free."""
        if not self._waiting or len(self._running) >= self._options.max_num_seqs:
            return False
        state = self._waiting[0]
        cached = self._cache.reserve(state, state.max_cached_tokens)
        if cached is None:
            return False
        self._waiting.popleft()
        state.num_computed_tokens = cached
        state.status = RequestStatus.running
        self._running.append(state)
        self.counts.add(f"admission.{self._admission.name}")
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
            if state.status is not RequestStatus.running:
                continue
            state.num_in_flight_tokens -= chunk.num_tokens
            state.num_computed_tokens = chunk.start + chunk.num_tokens
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
                self._release(state)
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
