"""The step loop: schedule, build, forward, sample, update; ``sync`` and ``overlap`` side by side.

``overlap`` keeps one step in flight. While step N runs, the host schedules and builds step N+1;
once N's tokens are sampled, the rows of N+1 that wait for them are filled in and N+1 is launched;
then N's results are processed (append, stop, free, detokenise) while N+1 runs. Requests, blocks
and sampling stay with the thread that calls.

Invariants, each pinned by a test:

- The tokens are those of ``sync``: a row is launched only when its token is known.
- A request that ends while a step is in flight has one row too many in it, whose result is
  dropped. Its blocks may be handed out again at once: whoever gets them is launched after
  the step in flight has ended, and writes a slot before reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.decode_padding import DecodePadding
from labkit.engine.device_logits import WaitLogits
from labkit.engine.engine_protocol import Counters, TokenEvent
from labkit.engine.input_builder import InputBuilder
from labkit.engine.model_runner import StepLauncher
from labkit.engine.parallel.schedule_check import NoScheduleCheck
from labkit.engine.sampler import Sampled, Sampler
from labkit.engine.scheduler import Scheduler
from labkit.engine.scheduler_output import SchedulerOutput
from labkit.engine.speculation.draft_verification import Speculation

Results = dict[str, Sequence[Sampled]]


class PendingStep(NamedTuple):
    """A step that was launched; ``logits`` waits for its end."""

    scheduled: SchedulerOutput
    batch: Batch
    logits: WaitLogits


class StepLoop:
    """The parts of a step, and the two orders in which they run.

    ``pipeline`` says whose results a step processes: its own, or those of the step before;
    ``peers`` who must schedule the same before it is computed.
    Counted are ``pipeline.overlapped``, steps launched before the results of the one before were
    processed.
    """

    def __init__(
        self,
        pipeline: config.Pipeline,
        scheduler: Scheduler,
        builder: InputBuilder,
        padding: DecodePadding,
        runner: StepLauncher,
        speculation: Speculation,
        counters: Counters,
        peers: NoScheduleCheck,
    ) -> None:
        self._peers = peers
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._builder = builder
        self._padding = padding
        self._runner = runner
        self._sampler = Sampler()
        self._speculation = speculation
        self._counters = counters
        self._in_flight: PendingStep | None = None
        self._every = {
            "steps.total": 1,
            f"pipeline.{pipeline.value}": 1,
            f"ranks.{peers.ranks}": 1,
            f"speculation.{speculation.name}": 1,
        }

    def step(self) -> list[TokenEvent]:
        """Run one step as ``engine.pipeline`` says; return its events."""
        return self.overlap() if self._pipeline is config.Pipeline.overlap else self.sync()

    def sync(self) -> list[TokenEvent]:
        """Launch a step and process its results: nothing is ever in flight."""
        scheduled = self._schedule()
        if not scheduled:
            return []
        batch = self._build(scheduled)
        step = self._launch(scheduled, batch)
        return self._scheduler.update(step.scheduled, self._sample(step))

    def overlap(self) -> list[TokenEvent]:
        """Launch a step and process the results of the one before, while it runs."""
        scheduled, last = self._schedule(), self._in_flight
        batch = self._build(scheduled) if scheduled else None
        self._in_flight = None
        sampled = self._sample(last) if last else {}
        if batch:
            fill_placeholders(batch, sampled)
            self._in_flight = self._launch(scheduled, batch)
            if last:
                self._counters.add("pipeline.overlapped")
        return self._scheduler.update(last.scheduled, sampled) if last else []

    def _schedule(self) -> SchedulerOutput:
        scheduled = self._speculation.draft(self._scheduler.schedule())
        self._peers.check_step(scheduled, self._counters)
        return scheduled

    def _build(self, scheduled: SchedulerOutput) -> Batch:
        return self._padding.pad(self._builder.build(scheduled))

    def _launch(self, scheduled: SchedulerOutput, batch: Batch) -> PendingStep:
        step = PendingStep(scheduled, batch, self._runner.launch(batch))
        computed = batch.num_tokens
        decodes = computed - batch.prefill_tokens
        shape = "decode" if not batch.prefill_tokens else "mixed" if decodes else "prefill"
        self._counters.add_all(
            {
                **self._every,
                f"steps.{shape}": 1,
                "tokens.prefill": batch.prefill_tokens,
                "tokens.decode": decodes,
                "tokens.computed": computed,
                "tokens.sampled": len(batch.sampling),
                "spec.unit_segments": batch.num_segments - len(scheduled.chunks),
            }
        )
        return step

    def _sample(self, step: PendingStep) -> Results:
        """Wait for a step; return the tokens of every request that samples."""
        drawn = self._sampler(step.logits(), step.batch.sampling)
        return self._speculation.accept(step.scheduled, drawn)

    def discard(self) -> None:
        """Wait for the step in flight and drop its results: every request in it has ended."""
        last, self._in_flight = self._in_flight, None
        if last:
            last.logits()

    def close(self) -> None:
        """Drop the step in flight, the model and who drafts."""
        self._in_flight = None
        self._runner.close()
        self._speculation = Speculation()


def fill_placeholders(batch: Batch, sampled: Results) -> None:
    """Put the tokens that a step had to wait for in their places.

    Raises
    ------
    RuntimeError
        A token is still unknown: the step would compute on nothing.
    """
    for row, request_id in batch.placeholders:
        if request_id in sampled:
            batch.tokens[row] = sampled[request_id][-1].token
    if batch.tokens.size and batch.tokens.min() < 0:
        raise RuntimeError("a step was launched before the tokens it computes were known")
