"""What happens in a run's process, for one arm or for all arms of a block in turn.

The finest pairing: what the machine does in a second happens to all arms alike. What
happens to the process as a whole (where its code and memory lie) does too, so the process
is the unit of inference: a block is one process and holds every arm once, and each arm
leaves one record as anywhere else. An arm alone in its process takes the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.config import Experiment
from labkit.experiment import known_answer_test, run_stages
from labkit.experiment.run_stages import Draft, Failure, Stopwatch
from labkit.records import Arm, Record
from labkit.workload.interleaving import Machine, Setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class Member:
    """One arm in the process: its draft, and what it is asked."""

    draft: Draft
    arm: Arm
    experiment: Experiment

    @cached_property
    def threads(self) -> int:
        """Its CPU budget: asked of the system once, for a turn is shorter than the answer."""
        return run_stages.budget_threads(self.experiment)


class Process:
    """One process with one arm, or with all arms of a block.

    ``common`` is the draft of what they share; ``culprit`` the arm whose turn it is.
    """

    def __init__(self, records: Sequence[Record], arms: Sequence[Arm], watch: Stopwatch) -> None:
        self.common = Draft(records[0], watch)
        self.members = [
            Member(Draft(record, Stopwatch(watch.spawned_ns)), arm, run_stages.experiment_of(arm))
            for record, arm in zip(records, arms, strict=True)
        ]
        self.culprit: Member | None = None

    def run(self) -> list[Record]:
        """Go through all stages, and give every arm's record whatever happened."""
        experiments = [member.experiment for member in self.members]
        with run_stages.named_failures(self.common):
            probe = run_stages.begin(self.common)
            with self.common.watch.time("load"):
                turns = run_stages.load(experiments, self._setting(probe), self.common)
            try:
                self._canary()
                with self.common.watch.time("warm_up"):
                    turns.warm_up()
                with self.common.watch.time("measure"):
                    measurements = turns.measure(lambda what: None)
                self._canary()
            finally:
                turns.close()
            run_stages.probe_again(self.common, probe)
            run_stages.note_limits(self.common, experiments[0])
            for member, measurement in zip(self.members, measurements, strict=True):
                run_stages.accept(measurement, member.arm, member.draft)
        run_stages.finish(self.common)
        return [self._record(member) for member in self.members]

    def prepare(self) -> None:
        """Compile, build and cache whatever the arms' runs will need; measure nothing."""
        from labkit import workload

        experiments = [member.experiment for member in self.members]
        probe = run_stages.start_probe(self.common)
        probe.time()
        for experiment in experiments:
            workload.prepare(experiment)
        turns = run_stages.load(experiments, self._setting(probe), self.common)
        try:
            turns.prepare()
        finally:
            turns.close()
        run_stages.note_limits(self.common, experiments[0])

    def _setting(self, machine: Machine) -> Setting:
        lead = self.common.record
        order = random.Random(f"labkit turns/{lead.seed}/{lead.block}/{lead.position}")
        return Setting(lead.seed, order, self._turn, machine)

    @property
    def values(self) -> dict[str, NDArray[np.float32]]:
        """The outputs that arms do not agree on, by digest."""
        return {d: v for member in self.members for d, v in member.draft.values.items()}

    @contextmanager
    def _turn(self, arm: int) -> Iterator[None]:
        """Time one arm's turn; its CPU budget holds, and it is to blame for what goes wrong."""
        member = self.culprit = self.members[arm]
        run_stages.use_threads(member.threads)
        with member.draft.watch.time("turns"):
            yield
        self.culprit = None

    def _canary(self) -> None:
        with self.common.watch.time("canary"):
            self.common.note(canary="ok" if known_answer_test.check() else "no mlx")

    def _record(self, member: Member) -> Record:
        """Return an arm's record: its own, and an equal share of the seconds spent on all."""
        common, draft, alone = self.common, member.draft, len(self.members) == 1
        if not common.record.ok:
            detail = common.record.detail or ""
            if self.culprit is not None and self.culprit is not member:
                detail = f"in one process with {self.culprit.draft.record.run}: {detail}"
            draft.fail(Failure(common.record.outcome, detail))
        draft.note(**common.record.notes, compiles=dict(common.compiles))
        if not alone:
            draft.note(together=[m.draft.record.run for m in self.members])
        spent = {**common.watch.seconds, "total": common.watch.since_spawn()}
        shared = {stage: round(s / len(self.members), 6) for stage, s in spent.items()}
        return replace(
            draft.record,
            environment=common.record.environment,
            environment_end=common.record.environment_end,
            probe=common.record.probe,
            seconds={**shared, **draft.watch.seconds},
        )
