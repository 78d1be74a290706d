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

from collections.abc import Mapping, Sequence

from labkit import config
from labkit.engine import schedule_policy
from labkit.engine.engine_protocol import Counters, EngineError, FinishReason, TokenEvent
from labkit.engine.kv_layout.kv_cache_manager import KVCacheManager
from labkit.engine.request import Request, RequestState, RequestStatus
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import Phase, ScheduledChunk, SchedulerOutput, StepBuilder
from labkit.engine.waiting_queue import WaitingQueue


class Scheduler:
    """Moves requests through their one state machine; what to prefer, ``scheduling`` says.

    ``cache`` is where KV memory is reserved and released; ``eos_token_ids`` end a request that
    does not ignore them.
    """

    def __init__(
        self, options: config.Scheduler, cache: KVCacheManager, eos_token_ids: frozenset[int]
    ) -> None:
        self._options = options
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._live: dict[str, RequestState] = {}
        self._place = schedule_policy.QUEUE_KEYS[options.queue]
        self._waiting = WaitingQueue(self._place)
        self._running: dict[str, RequestState] = {}  # in the order of admission
        self._phases = schedule_policy.PHASE_ORDERS[options.order, options.composition]
        self._split = options.composition is config.Composition.split
        self._last: Phase | None = None
        self._open = schedule_policy.ADMISSIONS[options.admission]
        self._chunk_cap = schedule_policy.CHUNK_CAPS[options.chunk_policy]
        self._reservation = schedule_policy.RESERVATIONS[options.reservation]
        given = options.watermark
        self._watermark = config.DEFAULT_WATERMARK if given is None else given
        self._serial = 0
        self.counts = Counters()

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running requests whose keys and values are computed."""
        return sum(state.num_computed_tokens for state in self._running.values())

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
        reason = self._cache.refusal_reason(state.max_cached_tokens)
        if reason is not None:
            raise EngineError(
                f"request {state.request_id}: {state.num_prompt_tokens} prompt tokens and "
                f"max_tokens={state.request.params.max_tokens} {reason}; raise the budget "
                "(engine.budget)"
            )
        self._live[request.request_id] = state
        self._serial += 1
        self._waiting.add(state)
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
        self._waiting.add(state)
        self.counts.add("preemptions")

    def _end(self, state: RequestState) -> None:
        """Finish or abort a live request."""
        self._release(state)
        state.status = RequestStatus.finished
        del self._live[state.request_id]

    def _release(self, state: RequestState) -> None:
        """Take a live request out of its list and free what it holds: the only way to leave."""
        if state.status is RequestStatus.running:
            del self._running[state.request_id]
        else:
            self._waiting.remove(state)
        self._cache.release(state.request_id)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's chunks: who goes first takes what it needs of the token budget."""
        step = StepBuilder(self._options.max_num_batched_tokens, self._running.values())
        for phase in self._phases(self._last):
            if phase is Phase.decode:
                for state in step.work[phase]:
                    self._take(step, step.chunks[phase], state)
            elif step.work[phase] or self._waiting:
                self._prefill(step)
            if self._split and step.only_phase is not None:
                break
        self._last = step.only_phase
        self._count(step)
        output = step.output()
        for chunk in output.chunks:  # in flight until ``update`` records what came of it
            chunk.state.num_in_flight_tokens += chunk.num_tokens
            chunk.state.num_unknown_tokens += chunk.samples
        return output

    def _prefill(self, step: StepBuilder) -> None:
        """Schedule prompts, of those that run and then of those that wait."""
        options, left, chunks = self._options, step.budget, step.chunks[Phase.prefill]
        cap = self._chunk_cap(options.chunk, len(step.work[Phase.decode]))
        allowed = schedule_policy.prefill_budget(left, options.prefill_cap, options.prefill_floor)
        step.budget = allowed
        for state in step.work[Phase.prefill]:
            self._take(step, chunks, state, cap)
        while self._open(step.num_running, step.budget) and (new := self._admit()):
            step.work[Phase.prefill].append(new)
            self._take(step, chunks, new, cap)
        spent = allowed - step.budget
        if allowed < left and not step.budget:
            self.counts.add("steps.prefill_capped")
        if spent > left:
            self.counts.add("steps.prefill_floored")
        step.budget = max(0, left - spent)

    def _take(
        self,
        step: StepBuilder,
        chunks: list[ScheduledChunk],
        state: RequestState,
        cap: int | None = None,
    ) -> None:
        """Schedule as many of a request's tokens as budget, chunk cap and memory allow.

        Memory that is missing is taken from the last in line. The first in line is never
        preempted, and fits the memory alone: it always advances, so steps are bounded.
        """
        if state.status is not RequestStatus.running:  # preempted for another in this very step
            return
        count = min(state.num_pending_tokens, step.budget)
        if cap is not None and cap < count:
            count = cap
            self.counts.add(f"chunk.{self._options.chunk_policy.value}")
        if count <= 0:
            return
        start = state.num_scheduled_tokens
        if start + count > state.num_held_tokens:
            while not self._cache.grow(state.request_id, start + count):
                victim = max(self._running.values(), key=self._place)
                self.preempt(victim.request_id)
                step.drop(victim)
                if victim is state:
                    return
            state.num_held_tokens = start + count
        chunks.append(ScheduledChunk(state, start, count))
        step.budget -= count

    def _admit(self) -> RequestState | None:
        """Let the first waiting request run, if a place and the memory asked for are free."""
        state = self._waiting.first
        if state is None or len(self._running) >= self._options.max_num_seqs:
            return None
        tokens, spare = self._reservation(state, len(self._running), self._watermark)
        cached = self._cache.reserve(state, tokens, spare)
        if cached is None:
            return None
        self._waiting.remove(state)
        state.num_computed_tokens, state.num_held_tokens = cached, tokens
        state.status = RequestStatus.running
        self._running[state.request_id] = state
        self.counts.record_peak("requests.most_running", len(self._running))
        self.counts.add(f"admission.{self._options.admission.value}")
        self.counts.add(f"reservation.{self._options.reservation.value}")
        if self._waiting.overtaken_by(state):
            self.counts.add(f"queue.{self._options.queue.value}")
        return state

    def _count(self, step: StepBuilder) -> None:
        if all(step.work):  # both phases had something to compute: who goes first counts
            self.counts.add(f"order.{self._options.order.value}")
            self.counts.add(f"composition.{self._options.composition.value}")
        if not step.budget:
            self.counts.add("steps.full")

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[Sampled]]
    ) -> list[TokenEvent]:
        """Record a step's results: advance, publish, append, stop, free.

        ``output`` is what ``schedule`` returned, drafts added; ``sampled`` has the tokens of
        every request whose chunk samples: one, and one more for each draft that was right.
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
            self._cache.cache_blocks(state)
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
        running = set(self._running)
        waiting = {state.request_id for state in self._waiting}
        if running & waiting or running | waiting != set(self._live):
            raise AssertionError("a live request is not in exactly one list")
        if len(running) > self._options.max_num_seqs:
            raise AssertionError("more requests run than max_num_seqs")
        for state in self._running.values():
            if not 0 <= state.num_computed_tokens < state.num_tokens:
                raise AssertionError(f"request {state.request_id} has nothing left to compute")
        self._cache.check(running)
