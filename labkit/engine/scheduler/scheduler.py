"""The scheduler: which tokens a step computes, and the one state machine of requests.

A step with the default options (the alternatives are in ``scheduling_policies``):

    budget = max_num_batched_tokens
    for request in running, decodes:          # order=decode_first: one token each
        schedule(request)
    for request in running, prefills:         # composition=mixed: prompts share the step
        schedule(request)                     # chunk=null: as much of the prompt as fits
    while budget and len(running) < max_num_seqs and waiting:    # admission=continuous
        if the KV memory of all its tokens is not free: break    # reservation=full
        move waiting.first to running         # queue=fcfs; its cached prefix is computed already
        schedule(it)

    def schedule(request):
        tokens = min(pending tokens of request, budget)
        while the request's KV memory is short:    # reservation=optimistic only
            preempt the one with the largest preemption key: it waits again
        budget -= tokens

A prompt that does not fit the budget takes several steps. With ``max_num_batched_tokens=8``,
request ``a``, which decodes, and request ``b``, whose prompt has 20 tokens, share these steps:

    step           1    2    3    4
    tokens of a    1    1    1    1
    tokens of b    7    7    6    1    # step 3 samples b's first output token, step 4 computes it

Invariants, each pinned by a test:

- A request has no prefill or decode state: ``num_computed_tokens`` catches up with the known
  tokens, and a chunk samples iff it reaches the last known token. Its ``Phase`` is derived from
  these numbers anew in every step.
- A request has KV memory for every token that a step computes for it. If no memory is free, the
  running request with the largest preemption key is preempted: it waits again and keeps its token
  ids.
- Finish, abort and preempt share one release path. The result of a request that no longer runs is
  dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from labkit import config
from labkit.engine.engine_protocol import (
    NO_TOKEN,
    Counters,
    EngineError,
    FinishReason,
    TokenEvent,
)
from labkit.engine.kv_cache_interface import KVCacheManager
from labkit.engine.request import MAX_SCORED_ROWS, Request, RequestState, RequestStatus
from labkit.engine.sampling.prompt_logprobs import ScoredPart, concatenate
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.scheduler import scheduling_policies
from labkit.engine.scheduler.scheduler_output import (
    Phase,
    PrefillShare,
    ScheduledChunk,
    SchedulerOutput,
    StepBuilder,
)
from labkit.engine.scheduler.waiting_queue import WaitingQueue

QUEUE_KEY, PREEMPTION_KEY = attrgetter("queue_key"), attrgetter("preemption_key")


class Scheduler:
    """Owns all live requests and moves them between waiting, running and finished.

    ``options``: ``engine.scheduler``. Each policy option selects a function of
    ``scheduling_policies``. ``cache``: reserves and releases the KV memory of requests.
    ``eos_token_ids``: ids that end a request, unless it sets ``ignore_eos``.
    """

    def __init__(
        self, options: config.Scheduler, cache: KVCacheManager, eos_token_ids: frozenset[int]
    ) -> None:
        self._options = options
        self._policies = scheduling_policies.select(options)
        self._cache = cache
        self._aligns_chunks = cache.aligns_chunks
        self._grows_by_chunk = cache.grows_by_chunk
        self._eos_token_ids = eos_token_ids
        self._live: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(QUEUE_KEY)
        self._running: dict[str, RequestState] = {}  # in the order of admission
        self._last_phase: Phase | None = None
        self._num_arrivals = 0
        self.counts = Counters()

    def schedule(self) -> SchedulerOutput:
        """Return the chunks of the next step. The module's docstring describes the algorithm."""
        step = StepBuilder(self._options.max_num_batched_tokens, self._running.values())
        for phase in self._phases(step):
            if phase is Phase.decode:
                for state in step.pending[phase]:
                    self._schedule_chunk(step, phase, state, step.token_budget)
            elif step.pending[phase] or self._waiting:
                self._schedule_prefills(step)
            if self._policies.split and step.only_phase is not None:
                break  # composition=split: decodes or prefills, never both
        self._last_phase = step.only_phase
        scheduling_policies.count_decisions(self.counts, self._policies, step)
        return step.finish()

    def _phases(self, step: StepBuilder) -> scheduling_policies.Phases:
        """Return the order of the phases: the option's, unless the queue has one of its own."""
        usual = self._policies.phase_order(self._last_phase)
        prefills_first = self._policies.queue.prefills_first
        if prefills_first is None:
            return usual
        decodes, prefills = map(len, step.pending)
        first = prefills_first(decodes, prefills, len(self._waiting))
        own = scheduling_policies.PREFILLS_FIRST if first else scheduling_policies.DECODES_FIRST
        step.num_by_queue += own != usual
        return own

    def _schedule_prefills(self, step: StepBuilder) -> None:
        """Schedule prompt tokens of running requests, then admit requests and schedule theirs."""
        policies, start = self._policies, step.num_tokens
        left = step.token_budget - start
        budget = policies.prefill_budget(left)
        step_limit = start + budget
        chunk_cap = policies.chunk_cap(len(step.pending[Phase.decode]))
        for state in step.pending[Phase.prefill]:
            self._schedule_chunk(step, Phase.prefill, state, step_limit, chunk_cap)
        while policies.may_admit(step.num_running, left_now := step_limit - step.num_tokens):
            admitted = self._admit_first(step, left_now)
            if admitted is None:
                break
            self._schedule_chunk(step, Phase.prefill, admitted, step_limit, chunk_cap)
        step.prefill_share = PrefillShare(left, budget, spent=step.num_tokens - start)

    def _schedule_chunk(
        self,
        step: StepBuilder,
        phase: Phase,
        state: RequestState,
        step_limit: int,
        chunk_cap: int | None = None,
    ) -> None:
        """Schedule as many of a request's tokens as step limit, chunk cap and KV memory allow.

        ``step_limit`` is the largest number of tokens that the whole step may reach,
        ``chunk_cap`` the largest number for this request (None: no cap).
        """
        if state.status is not RequestStatus.running:  # preempted earlier in this step
            return
        count = min(state.num_pending_tokens, step_limit - step.num_tokens)
        if chunk_cap is not None and chunk_cap < count:
            count = chunk_cap
            step.num_capped += 1
        start = state.num_scheduled_tokens
        if state.request.params.prompt_logprobs is not None and start < state.num_prompt_tokens - 1:
            count = min(count, MAX_SCORED_ROWS - step.num_scored_rows)
        if count <= 0:
            return
        if self._aligns_chunks and phase is Phase.prefill:
            count = self._cache.align_chunk(state, start, count)
        needs_memory = self._grows_by_chunk or start + count > state.num_reserved_tokens
        if needs_memory and not self._grow_or_preempt(step, state, start + count):
            return
        step.chunks[phase].append(ScheduledChunk(state, start, count))
        step.num_tokens += count

    def _grow_or_preempt(self, step: StepBuilder, state: RequestState, num_tokens: int) -> bool:
        """Ensure that a request has KV memory for its first ``num_tokens`` tokens.

        While memory is short, the running request with the largest preemption key is preempted.
        Returns False if this was ``state`` itself. The first request in that order is never
        preempted and fits into the memory by itself, so it advances in every step, and the number
        of steps is bounded.
        """
        while not self._cache.grow(state.request_id, num_tokens):
            victim = max(self._running.values(), key=PREEMPTION_KEY)
            step.num_by_queue += victim is not max(self._running.values(), key=QUEUE_KEY)
            self.preempt(victim.request_id)
            step.remove(victim)
            if victim is state:
                return False
        state.num_reserved_tokens = max(state.num_reserved_tokens, num_tokens)
        return True

    def _admit_first(self, step: StepBuilder, budget: int) -> RequestState | None:
        """Admit the first waiting request and return it, or return None.

        None: no request waits, ``max_num_seqs`` requests run, the queue holds it back, or too
        little KV memory is free. ``budget``: tokens left in the step.
        """
        state, num_running = self._waiting.first, len(self._running)
        if state is None or num_running >= self._options.max_num_seqs:
            return None
        admits = self._policies.queue.admits
        if admits is not None and not admits(state.request, num_running, budget):
            step.num_by_queue += 1
            return None
        num_tokens, spare = self._policies.reservation(state, num_running)
        num_cached = self._cache.reserve(state, num_tokens, spare)
        if num_cached is None:
            return None
        self._waiting.remove(state)
        self._running[state.request_id] = state
        state.admit(num_tokens, num_cached)
        step.admit(state, len(self._running), overtakes=self._waiting.has_earlier_than(state))
        return state

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, Sequence[Sampled]],
        scored: Mapping[str, ScoredPart] = MappingProxyType({}),
    ) -> list[TokenEvent]:
        """Record a step's results and return the events of its tokens.

        Advances each request, appends its sampled tokens and caches its full blocks. If a token
        ends the request, its memory is freed. ``sampled`` has, by request id, the new tokens of
        every chunk that samples: one, and one more for each accepted draft. ``scored`` has the log
        probabilities of the prompt tokens that the step scored.
        """
        events: list[TokenEvent] = []
        num_failed = 0
        for chunk in output.chunks:
            state = chunk.state
            if state.status is not RequestStatus.running or chunk.is_outdated:
                continue  # the request ended, or was preempted, while the step was in flight
            if chunk.start < state.num_computed_before_preemption:
                self.counts.add("tokens.recomputed", chunk.num_recomputed)
            state.num_in_flight_tokens -= chunk.num_tokens
            state.num_computed_tokens = chunk.start + chunk.num_tokens
            if state.request_id in scored:
                record_scored(state, scored[state.request_id])
            own: list[TokenEvent] = []
            if chunk.samples:
                own = append_sampled(state, sampled[state.request_id], self._eos_token_ids)
            self._cache.cache_blocks(state)  # accepted drafts included
            if not own:
                continue
            events += own
            reason = own[-1].finish_reason
            if reason is not None:
                failed = reason == "error"
                num_failed += failed
                self._end(state, "requests.sampling_failed" if failed else "requests.finished")
        self.counts.add("tokens.output", len(events) - num_failed)
        return events

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``EngineError`` if it needs more than the whole KV cache."""
        state = RequestState(request, self._num_arrivals)
        reason = self._cache.refusal_reason(state.max_kv_tokens)
        if reason is not None:
            raise EngineError(
                f"{state.num_prompt_tokens} prompt tokens and "
                f"max_tokens={request.params.max_tokens} {reason}; raise the budget (engine.budget)"
            )
        queue = self._policies.queue  # called once, because it may be a user's class
        state.queue_key, state.preemption_key = queue.key(state), queue.preemption_key(state)
        self._live[request.request_id] = state
        self._num_arrivals += 1
        self._waiting.add(state)
        self.counts.add("requests.submitted")

    def abort(self, request_id: str) -> None:
        """End a request and release its KV memory. Unknown ids are ignored."""
        state = self._live.get(request_id)
        if state is not None:
            self._end(state, "requests.aborted")

    def preempt(self, request_id: str) -> None:
        """Move a running request back to the waiting queue and release its KV memory.

        Its tokens are computed again later. Ids of requests that are not running are ignored.
        """
        if self.is_running(request_id):
            state = self._live[request_id]
            try:
                self._release(state)
            finally:  # a user's eviction policy may fail
                state.preempt()
                self._waiting.add(state)
            self.counts.add("preemptions")

    def close(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    def _end(self, state: RequestState, counter: str) -> None:
        """Release a live request and forget it. ``counter`` counts why it ended."""
        try:
            self._release(state)
        finally:
            state.status = RequestStatus.finished
            del self._live[state.request_id]
        self.counts.add(counter)

    def _release(self, state: RequestState) -> None:
        if state.status is RequestStatus.running:
            del self._running[state.request_id]
        else:
            self._waiting.remove(state)
        self._cache.release(state.request_id)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running requests whose keys and values are computed."""
        return sum(state.num_computed_tokens for state in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def check(self) -> None:
        """Raise ``AssertionError`` unless the lists of requests and the KV cache agree."""
        running = set(self._running)
        waiting = {state.request_id for state in self._waiting}
        if running & waiting or running | waiting != set(self._live):
            raise AssertionError(
                "a live request is not in exactly one of the waiting and running lists"
            )
        if len(running) > self._options.max_num_seqs:
            raise AssertionError("more requests run than max_num_seqs")
        for state in self._running.values():
            if not 0 <= state.num_computed_tokens < state.num_tokens:
                raise AssertionError(
                    f"running request {state.request_id} has nothing left to compute"
                )
        self._cache.check(running)


def record_scored(state: RequestState, part: ScoredPart) -> None:
    """Append a step's prompt log probabilities, unless recorded; ``RuntimeError`` after a gap."""
    if part.start > state.num_scored_rows:
        raise RuntimeError(
            f"request {state.request_id}: prompt rows {state.num_scored_rows} to {part.start} were "
            "not scored"
        )
    if part.start == state.num_scored_rows:
        state.scored_parts.append(part.logprobs)
        state.num_scored_rows += len(part.logprobs.tokens)


def append_sampled(
    state: RequestState, results: Sequence[Sampled], eos_token_ids: frozenset[int]
) -> list[TokenEvent]:
    """Append sampled tokens, up to one that ends the request, and return their events.

    All but the last token of ``results`` are accepted drafts, which are computed already. A
    request whose next token could not be sampled ends with an error event.
    """
    events = []
    prompt_logprobs = None
    if state.scored_parts and not state.num_output_tokens:
        prompt_logprobs = concatenate(state.scored_parts)
        state.scored_parts = []
    state.num_output_placeholders -= 1
    state.num_computed_tokens += len(results) - 1
    for result in results:
        if result.error is not None:
            events.append(TokenEvent(state.request_id, NO_TOKEN, "error", error=result.error))
            break
        state.token_ids.append(result.token)
        reason = _finish_reason(state, eos_token_ids)
        events.append(
            TokenEvent(
                state.request_id,
                result.token,
                reason,
                result.margin,
                logprobs=result.logprobs,
                num_cached_tokens=state.num_cached_tokens,
                prompt_logprobs=prompt_logprobs,
            )
        )
        prompt_logprobs = None
        if reason is not None:
            break
    return events


def _finish_reason(state: RequestState, eos_token_ids: frozenset[int]) -> FinishReason | None:
    if is_stop(state, state.token_ids[-1], eos_token_ids):
        return "stop"
    return "length" if state.num_output_tokens >= state.request.params.max_tokens else None


def is_stop(state: RequestState, token: int, eos_token_ids: frozenset[int]) -> bool:
    """Return whether a token, if it is sampled, ends a request of any length."""
    params = state.request.params
    return token in params.stop_token_ids or (not params.ignore_eos and token in eos_token_ids)
