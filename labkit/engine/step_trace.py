"""A trace of engine steps: what each step computed, which blocks requests held, and the times.

A trace replaces the parts of the engine's loop by functions that time them; without a trace no code
of this module runs. While a request is served, a trace only stores references, times and changes of
block tables. ``StepTrace.report`` builds the values for the record's file afterwards. The file's
schema is that of :mod:`labkit.records.step_trace_file`.

A step's times are the start and the duration of each of these parts:

    schedule    the scheduler's choice, drafting included
    draft       drafting, a part of ``schedule``; without speculation next to nothing
    build       packed arrays, and padding rows of pure decodes
    plan        block tables and maps for attention (``KVCache.prepare_step``)
    forward     the model. With ``engine.pipeline=overlap`` and MLX arrays, this time ends when the
                host has waited for the model, so it includes other work of the host
    sample      sampling and the acceptance of drafts. A captured graph of decodes samples greedily
                within ``forward``
    update      append tokens, end requests, cache full blocks and free memory
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.engine.batch import Batch, Ints
from labkit.engine.engine_protocol import TokenEvent
from labkit.engine.runner.model_runner import ModelRunner, RunModel
from labkit.engine.sampling.step_logits import Logits, WaitLogits
from labkit.engine.scheduler.scheduler_output import SchedulerOutput
from labkit.engine.step_loop import ComputedStep, PendingStep, StepParts

if TYPE_CHECKING:
    from labkit.engine.kv_cache_interface import BlockTable, KVCacheManager, StepAttention
    from labkit.engine.scheduler.scheduler import Scheduler

Clock = Callable[[], float]
# A trace ends early when its steps have this many chunks together.
MAX_CHUNKS = 200_000


@dataclass(slots=True)
class TracedStep:
    """What a trace records about one step."""

    scheduled: SchedulerOutput  # the scheduler's output, drafts included
    # By request, for a block table that is new or has changed: how many of its first blocks are
    # unchanged, and the ids of the blocks after them
    tables: dict[str, tuple[int, Ints]]
    # Requests whose blocks were released, or that were preempted, since the previous step
    released: list[str]
    preempted: list[str]
    lingering: Collection[str]  # finished requests whose rows a static batch computes
    # Numbers of waiting requests, free blocks and evictable blocks after scheduling. None: the
    # layout has no blocks.
    waiting: int
    free_blocks: int | None
    evictable_blocks: int | None
    # KV memory after scheduling, before the step's tokens are computed
    reserved_bytes: int
    used_bytes: int
    cu_seqlens_q: Ints | None = None
    padding: int = 0
    # By request: tokens for which a layout without blocks has memory, after the step
    slots: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    # By part: start and end in seconds on the trace's clock
    times: dict[str, tuple[float, float]] = field(default_factory=dict)


class StepTrace:
    """A record of an engine's next ``limit`` steps, and a count of all its steps.

    ``limit``: the largest number of steps to trace. ``clock``: returns seconds. It may be read in
    the thread that runs the model. ``scheduler``, ``cache``: the engine's parts. They are only
    read.
    """

    def __init__(
        self, limit: int, clock: Clock, scheduler: Scheduler, cache: KVCacheManager
    ) -> None:
        self._clock = clock
        self._cache = cache
        self._limit = limit
        self._scheduler = scheduler
        self._pool = cache.pool
        self._chunks_left = MAX_CHUNKS
        self._steps: list[TracedStep] = []
        self._num_steps = 0
        # By the id of the scheduler's output, or of a batch. These are held: a step that is dropped
        # stays here, and no later batch may have its id.
        self._open: dict[int, tuple[object, TracedStep]] = {}
        self._tables: dict[str, BlockTable] = {}  # of the previous step
        self._preemptions: dict[str, int] = {}
        self._draft_times = 0.0, 0.0  # of the step that is being scheduled

    def time_parts(self, parts: StepParts) -> StepParts:
        """Return functions that call the parts of a step and trace them."""

        def schedule() -> SchedulerOutput:
            start = self._clock()
            scheduled = parts.schedule()
            end = self._clock()
            step = self.begin(scheduled) if scheduled else None
            if step is not None:
                step.times = {"schedule": (start, end), "draft": self._draft_times}
            return scheduled

        def draft(scheduled: SchedulerOutput) -> SchedulerOutput:
            start = self._clock()
            drafted = parts.draft(scheduled)
            self._draft_times = start, self._clock()
            return drafted

        def build(scheduled: SchedulerOutput) -> Batch:
            with self.span(scheduled, "build") as step:
                batch = parts.build(scheduled)
            if step is not None:
                step.cu_seqlens_q, step.padding = batch.cu_seqlens_q, batch.padding
                self._open[id(batch)] = batch, step
            return batch

        def sample(pending: PendingStep, logits: Logits) -> ComputedStep:
            with self.span(pending.scheduled, "sample") as step:
                results = parts.sample(pending, logits)
            if step is not None and pending.scheduled.drafts:
                step.accepted = {r: len(tokens) - 1 for r, tokens in results.sampled.items()}
            return results

        def update(results: ComputedStep) -> list[TokenEvent]:
            pending, cache = results.step, self._cache
            step = self.step_of(pending.scheduled)
            if step is not None and step.free_blocks is None:
                step.slots = {r: cache.num_slots(table) for r, table in cache.tables.items()}
            with self.span(pending.scheduled, "update"):
                events = parts.update(results)
            self._open.pop(id(pending.scheduled), None)
            self._open.pop(id(pending.batch), None)
            return events

        return StepParts(schedule, draft, build, sample, update)

    def time_model(self, run_model: RunModel) -> TracedRunModel:
        return TracedRunModel(run_model, self)

    def span(self, key: object, part: str) -> Span:
        """Begin to time a part of a step; ``key`` is as in ``step_of``."""
        return Span(self.step_of(key), part, self._clock)

    def begin(self, scheduled: SchedulerOutput) -> TracedStep | None:
        """Add a step that was just scheduled; return None if the trace is full."""
        self._num_steps += 1
        self._chunks_left -= len(scheduled.chunks)
        if len(self._steps) >= self._limit or self._chunks_left < 0:
            return None
        changed, released = self._changed_tables()
        pool, scheduler = self._pool, self._scheduler
        step = TracedStep(
            scheduled,
            changed,
            released,
            self._preempted(scheduled, changed, released),
            self._cache.lingering_requests(),
            waiting=scheduler.num_waiting,
            free_blocks=None if pool is None else pool.num_free,
            evictable_blocks=None if pool is None else pool.num_evictable,
            reserved_bytes=self._cache.reserved_bytes,
            used_bytes=scheduler.num_computed_tokens * self._cache.token_bytes,
        )
        self._steps.append(step)
        self._open[id(scheduled)] = scheduled, step
        return step

    def _changed_tables(self) -> tuple[dict[str, tuple[int, Ints]], list[str]]:
        """Return the block tables that are new or changed, and the requests that have none now."""
        changed, tables = {}, self._cache.tables
        for request_id, table in tables.items():
            before = self._tables.get(request_id)
            if before is not table:  # a table is immutable: the same object has the same blocks
                changed[request_id] = _difference(before, table)
        # Without a change, the old tables and the new ones are the same.
        if not changed and len(tables) == len(self._tables):
            return changed, []
        released = [request_id for request_id in self._tables if request_id not in tables]
        self._tables = dict(tables)
        return changed, released

    def _preempted(
        self, scheduled: SchedulerOutput, changed: Collection[str], released: list[str]
    ) -> list[str]:
        """Return the requests that were preempted since the previous step.

        A step may preempt a request and admit it again. Such a request is not in ``released``, but
        its table has changed.
        """
        preempted = [r for r in released if self._scheduler.is_live(r)]
        for request_id in preempted:
            self._preemptions[request_id] = self._preemptions.get(request_id, 0) + 1
        for chunk in scheduled.chunks if changed else ():
            request_id, count = chunk.state.request_id, chunk.preemption_count
            if count > self._preemptions.get(request_id, 0):
                self._preemptions[request_id] = count
                preempted.append(request_id)
        return preempted

    def step_of(self, key: object) -> TracedStep | None:
        """Return the traced step of a ``SchedulerOutput`` or a ``Batch``, if it has not ended."""
        _, step = self._open.get(id(key), (None, None))
        return step

    def report(self) -> dict[str, Any]:
        requests = {
            chunk.state.request_id: chunk.state.num_prompt_tokens
            for step in self._steps
            for chunk in step.scheduled.chunks
        }
        index = {request_id: number for number, request_id in enumerate(requests)}
        times = [time for step in self._steps for time in step.times.values()]
        origin = min((start for start, _ in times), default=0.0)
        return {
            "block_size": None if self._pool is None else self._pool.block_size,
            "num_blocks": None if self._pool is None else self._pool.num_blocks,
            "token_bytes": self._cache.token_bytes,
            "steps_total": self._num_steps,
            "requests": [{"id": r, "prompt_tokens": tokens} for r, tokens in requests.items()],
            "steps": [_step_json(step, index, origin) for step in self._steps],
        }


def _difference(before: BlockTable | None, table: BlockTable) -> tuple[int, Ints]:
    """Return how many first blocks both tables share, and the ids of the blocks after them."""
    ids = table.block_ids
    if before is None:
        return 0, ids
    shared = min(len(before), len(table))
    equal = before.block_ids[:shared] == ids[:shared]
    same = shared if equal.all() else int(equal.argmin())
    return same, ids[same:]


def _step_json(step: TracedStep, index: Mapping[str, int], origin: float) -> dict[str, Any]:
    chunks = step.scheduled.chunks
    # A decode is a chunk of one token after the prompt, and it samples; see
    # ``ScheduledChunk.is_prefill``.
    prefill = [
        not (c.samples and c.num_tokens == 1 and c.start >= c.state.num_prompt_tokens)
        for c in chunks
    ]
    # An aborted request may have blocks, but no chunk, and so no index. A layout without blocks
    # has a row for each request in place of blocks.
    has_blocks = step.free_blocks is not None
    times = dict(step.times)
    if {"plan", "forward"} <= times.keys():  # the model was called first
        times["forward"] = times["plan"][1], times["forward"][1]
    tables = [(index[r], *c) for r, c in step.tables.items() if has_blocks and r in index]
    return {
        "chunks": [
            [index[c.state.request_id], c.start, c.num_tokens, int(p), int(c.samples)]
            for c, p in zip(chunks, prefill, strict=True)
        ],
        "drafts": [
            [index[request_id], len(tokens), step.accepted.get(request_id, 0)]
            for request_id, tokens in step.scheduled.drafts.items()
        ],
        "cu_seqlens_q": [] if step.cu_seqlens_q is None else step.cu_seqlens_q.tolist(),
        "padding": step.padding,
        "blocks": [[request, same, ids.tolist()] for request, same, ids in tables],
        "released": [index[r] for r in step.released if r in index],
        "preempted": [index[r] for r in step.preempted if r in index],
        "lingering": [index[r] for r in step.lingering if r in index],
        "slots": [[index[r], slots] for r, slots in step.slots.items() if r in index],
        "waiting": step.waiting,
        "free_blocks": step.free_blocks,
        "evictable_blocks": step.evictable_blocks,
        "reserved_bytes": step.reserved_bytes,
        "used_bytes": step.used_bytes,
        "times_us": {
            part: _span_us(start - origin, end - origin) for part, (start, end) in times.items()
        },
    }


def _span_us(start: float, end: float) -> list[float]:
    """Return start and duration in us from seconds. The end, not the duration, is rounded.

    So a part ends no later than the next begins.
    """
    begin = round(start * 1e6, 1)
    return [begin, round(round(end * 1e6, 1) - begin, 1)]


class Span:
    """The time of a part of a step, from the call to the end of a ``with`` block, or to ``end``."""

    __slots__ = ("_clock", "_part", "_start", "_step")

    def __init__(self, step: TracedStep | None, part: str, clock: Clock) -> None:
        self._step, self._part, self._clock = step, part, clock
        self._start = clock()

    def __enter__(self) -> TracedStep | None:
        return self._step

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> None:
        if self._step is not None:
            self._step.times[self._part] = self._start, self._clock()


class TracedRunModel:
    """Runs the model and adds the times of a step's plan and forward to a trace."""

    def __init__(self, run_model: RunModel, trace: StepTrace) -> None:
        self._run_model = run_model
        self._trace = trace
        if isinstance(run_model, ModelRunner):
            memory = self._memory = run_model.memory

            def plan(batch: Batch) -> tuple[Batch, StepAttention]:
                with trace.span(batch, "plan") as step:
                    padded, attention = memory.prepare_step(batch)
                if step is not None:
                    step.padding += padded.total_q - batch.total_q
                return padded, attention

            run_model.memory = memory._replace(prepare_step=plan)

    def end(self) -> RunModel:
        """Stop timing; return the function that was timed."""
        if isinstance(self._run_model, ModelRunner):
            self._run_model.memory = self._memory
        return self._run_model

    def __call__(self, batch: Batch) -> Logits:
        """Run a step; see ``ModelRunner``. A pipelined engine calls this in its worker thread."""
        with self._trace.span(batch, "forward"):
            return self._run_model(batch)

    def launch(self, batch: Batch) -> WaitLogits:
        assert isinstance(self._run_model, ModelRunner)
        forward = self._trace.span(batch, "forward")
        wait_logits = self._run_model.launch(batch)

        def wait() -> Logits:
            logits = wait_logits()
            forward.end()
            return logits

        return wait
