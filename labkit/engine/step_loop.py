"""The step loop: schedule, build, pad, launch, sample, update; ``sync`` or ``overlap``.

A synchronous step:

    scheduled = speculation.draft(scheduler.schedule())    # chunks of requests, and drafts
    batch     = input_builder.build(scheduled)
    batch     = decode_padding.pad(batch)
    step      = launcher.launch(batch)                     # attention metadata, then one forward
    sampled   = sampler.sample_rows(step.wait_logits())    # drafts are accepted or rejected
    events    = scheduler.update(scheduled, sampled)

``overlap`` keeps one step in flight. While step N runs, the host schedules and builds step N+1.
When step N has ended, its tokens are sampled and replace the placeholders in the batch of step N+1,
which is launched. While N+1 runs, N's results are processed (append, stop, free, detokenise).
Scheduling, block management and sampling stay in the calling thread.

    host   schedule N+1, build | wait | sample N, launch N+1 | update N, schedule N+2, build | wait
    model  step N .................. |                       | step N+1 ..........................

Invariants, each pinned by a test:

- The tokens are the same as with ``sync``: a row is launched only when its input token is known.
- If a request ends while a step is in flight, that step computes one superfluous row for the
  request, and its result is dropped. The request's blocks may be allocated to another request
  immediately, because that request's step is launched after the step in flight has ended, and
  writes each slot of a block before it reads the slot.
- If all requests have ended, nothing waits for the step in flight before their events are
  returned. ``LLMEngine`` discards the step before the next one is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, TokenEvent
from labkit.engine.runner.decode_padding import DecodePadding
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.runner.model_runner import RunModel
from labkit.engine.runner.step_launchers import StepLauncher
from labkit.engine.sampling import sampler
from labkit.engine.sampling.prompt_logprobs import ScoredPart, score_step
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.step_logits import Logits, WaitLogits
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.scheduler.scheduler_output import SchedulerOutput
from labkit.engine.speculation.propose_and_verify import Speculator

if TYPE_CHECKING:
    from labkit.engine.runner.step_clocks import StepClocks
    from labkit.engine.step_trace import StepTrace


class PendingStep(NamedTuple):
    """A launched step. ``wait_logits`` blocks until the step's logits are computed."""

    scheduled: SchedulerOutput
    batch: Batch
    wait_logits: WaitLogits


class ComputedStep(NamedTuple):
    """A computed step: its new tokens and its prompt log probabilities, by request id."""

    step: PendingStep
    sampled: Mapping[str, Sequence[Sampled]]
    scored: Mapping[str, ScoredPart]


class StepParts(NamedTuple):
    """The functions that a step calls. A trace replaces them by functions that it times."""

    schedule: Callable[[], SchedulerOutput]
    draft: Callable[[SchedulerOutput], SchedulerOutput]  # called by ``schedule``
    build: Callable[[SchedulerOutput], Batch]
    sample: Callable[[PendingStep, Logits], ComputedStep]
    update: Callable[[ComputedStep], list[TokenEvent]]


class NoScheduleCheck:
    """The check of an engine in a single process, whose steps nobody else computes."""

    ranks = 1

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Return once all ranks have scheduled the same step."""


class StepLoop:
    """Runs the parts of a step in the order of ``engine.pipeline``.

    ``schedule_check`` compares each schedule with those of the other ranks before the step runs.
    The counter ``pipeline.overlapped`` is the number of steps that were launched when the previous
    step had ended, but before its results were processed. They run while the host processes them.
    """

    def __init__(
        self,
        pipeline: config.Pipeline,
        scheduler: Scheduler,
        input_builder: InputBuilder,
        decode_padding: DecodePadding,
        launcher: StepLauncher,
        speculation: Speculator,
        counters: Counters,
        schedule_check: NoScheduleCheck,
    ) -> None:
        self._run = self.overlap if pipeline is config.Pipeline.overlap else self.sync
        self._scheduler = scheduler
        self._input_builder = input_builder
        self._decode_padding = decode_padding
        self._launcher = launcher
        self._speculation = speculation
        self._counters = counters
        self._schedule_check = schedule_check
        self._in_flight: PendingStep | None = None
        self._flush_before_launch = False
        self._parts = StepParts(
            self._schedule, self._draft, self._build, self._sample, self._update
        )
        self._untraced: tuple[StepParts, Callable[[], RunModel]] | None = None
        self._step_counters = {
            "steps.total": 1,
            f"pipeline.{pipeline.value}": 1,
            f"ranks.{schedule_check.ranks}": 1,
            f"speculation.{speculation.name}": 1,
        }

    def trace(self, trace: StepTrace) -> None:
        """Let a trace time the parts of every step, until clocks do."""
        traced = trace.time_model(self._launcher.run_model)
        self._untraced = self._parts, traced.end
        self._parts, self._launcher.run_model = trace.time_parts(self._parts), traced

    def time_steps(self, clocks: StepClocks) -> None:
        """Let clocks time every step from now on, and no trace."""
        if self._untraced is not None:
            self._parts, end_trace = self._untraced
            self._launcher.run_model = end_trace()
        self._parts = clocks.time_parts(self._parts)
        clocks.time_launcher(self._launcher)

    def step(self) -> list[TokenEvent]:
        """Run ``sync`` or ``overlap``, according to ``engine.pipeline``, and return the events."""
        last, self._in_flight = self._in_flight, None  # a step that fails is no longer in flight
        results, self._in_flight = self._run(last)
        return self._parts.update(results) if results else []

    def sync(self, last: PendingStep | None) -> tuple[ComputedStep | None, None]:
        """Launch a step and return its results. No step stays in flight."""
        scheduled = self._parts.schedule()
        if not scheduled:
            return None, None
        return self._finish(self._launch(scheduled, self._parts.build(scheduled))), None

    def overlap(self, last: PendingStep | None) -> tuple[ComputedStep | None, PendingStep | None]:
        """Launch the next step; return the results of ``last``, and the step in flight.

        The results are processed while the new step runs.
        """
        scheduled = self._parts.schedule()  # while ``last`` runs
        batch = self._parts.build(scheduled) if scheduled else None
        results = self._finish(last) if last else None
        if self._flush_before_launch:
            self._flush_before_launch = False
            self._counters.flush()
        if batch is None:
            return results, None
        fill_placeholders(batch, results.sampled if results else {})
        step = self._launch(scheduled, batch)
        if last:
            self._counters.add("pipeline.overlapped")
        return results, step

    def _schedule(self) -> SchedulerOutput:
        scheduled = self._parts.draft(self._scheduler.schedule())
        self._schedule_check.check_step(scheduled, self._counters)
        return scheduled

    def _draft(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        return self._speculation.draft(scheduled)

    def _build(self, scheduled: SchedulerOutput) -> Batch:
        return self._decode_padding.pad(self._input_builder.build(scheduled))

    def _launch(self, scheduled: SchedulerOutput, batch: Batch) -> PendingStep:
        wait_logits = self._launcher.launch(batch)
        computed = batch.num_tokens
        decodes = computed - batch.prefill_tokens
        if not batch.prefill_tokens:
            shape = "decode"
        elif decodes:
            shape = "mixed"
        else:
            shape = "prefill"
        self._counters.add_all(
            {
                **self._step_counters,
                f"steps.{shape}": 1,
                "tokens.prefill": batch.prefill_tokens,
                "tokens.decode": decodes,
                "tokens.computed": computed,
                "spec.unit_segments": batch.num_segments - len(scheduled.chunks),
            }
        )
        return PendingStep(scheduled, batch, wait_logits)

    def _finish(self, step: PendingStep) -> ComputedStep:
        return self._parts.sample(step, step.wait_logits())

    def _sample(self, step: PendingStep, logits: Logits) -> ComputedStep:
        batch = step.batch
        rows = sampler.sample_rows(logits, batch.sampling)
        scored = score_step(logits, len(batch.sampling), batch.scored) if batch.scored else {}
        return ComputedStep(step, self._speculation.accept(step.scheduled, rows), scored)

    def _update(self, results: ComputedStep) -> list[TokenEvent]:
        return self._scheduler.update(results.step.scheduled, results.sampled, results.scored)

    def counters(self) -> dict[str, float]:
        """Return the counters.

        A step in flight may be changing in its thread what deferred functions read. So they are
        then called after that step and before the next launch, for a later call of this method.
        """
        in_flight = self._in_flight is not None
        self._flush_before_launch |= in_flight
        return self._counters.as_dict(flush=not in_flight)

    def drain(self) -> None:
        """Wait for the step in flight. The next step returns its results; a failed one is lost."""
        last, self._in_flight = self._in_flight, None
        if last:
            logits = last.wait_logits()
            self._in_flight = last._replace(wait_logits=lambda: logits)

    def discard(self) -> None:
        """Wait for the step in flight and drop its results. Its requests must all have ended."""
        last, self._in_flight = self._in_flight, None
        if last:
            last.wait_logits()

    def abandon(self) -> None:
        """Drop the step in flight after a failure. No thread runs a step afterwards."""
        self._in_flight = None
        self._launcher.wait_idle()

    def close(self) -> None:
        self._in_flight = None
        self._launcher.close()
        self._speculation = Speculator()


def fill_placeholders(batch: Batch, sampled: Mapping[str, Sequence[Sampled]]) -> None:
    """Replace a batch's placeholders by the tokens that the previous step sampled.

    If sampling failed for a request, the request is about to end. Its row then gets token 0, and
    the result is dropped. Raises ``RuntimeError`` if there is no sampled token for a placeholder.
    """
    for row, request_id in batch.placeholders:
        if request_id in sampled:
            last = sampled[request_id][-1]
            batch.tokens[row] = last.token if last.error is None else 0
    if batch.tokens.size and batch.tokens.min() < 0:
        raise RuntimeError("a step was launched before its input tokens were known")
