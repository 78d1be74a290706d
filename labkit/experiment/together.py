"""All arms of a block in one process, taking turns at every repeat (``in_process``).

The finest pairing for kernel workloads: what the machine does in a second happens to all
arms alike. What happens to the process as a whole (where its code and memory lie) does
too, so the process is the unit of inference: a block is one process and holds every arm
once, and each arm leaves one record as anywhere else. The arms are loaded in the block's
random order and take their turns in a fresh random order at every repeat.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from labkit.config import Case, Experiment
from labkit.experiment import canary, stages
from labkit.experiment.record import Arm, Record
from labkit.experiment.stages import Draft, Failure, Stopwatch
from labkit.workload.measurement import CaseResult, Measurement, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class Member:
    """One arm in the process: its draft, and what its turns have given so far."""

    draft: Draft
    arm: Arm
    experiment: Experiment
    cases: list[CaseResult] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    def case(self, name: str) -> Case | None:
        """Give the arm's case of that name."""
        return next((c for c in self.experiment.workload.cases if c.name == name), None)


@dataclass
class Seat:
    """A member at one case: its session, its repeats and the place of each in its round."""

    member: Member
    session: Session
    repeats: int
    turns: list[CaseResult] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class Block:
    """One process with all arms of a block.

    ``common`` is the draft of what they share; ``culprit`` the arm whose turn it is.
    """

    def __init__(self, records: Sequence[Record], arms: Sequence[Arm], watch: Stopwatch) -> None:
        self.common = Draft(records[0], watch)
        self.members = [
            Member(Draft(record, Stopwatch(watch.spawned_ns)), arm, stages.experiment_of(arm))
            for record, arm in zip(records, arms, strict=True)
        ]
        self.culprit: Member | None = None

    def run(self) -> list[Record]:
        """Go through all stages, and give every arm's record whatever happened."""
        with stages.named_failures(self.common):
            probe = stages.begin(self.common)
            self._canary()
            workloads = (member.experiment.workload for member in self.members)
            for name in dict.fromkeys(case.name for w in workloads for case in w.cases):
                self._measure(name)
            self._canary()
            stages.probe_again(self.common, probe)
            stages.note_limits(self.common, self.members[0].experiment)
            for member in self.members:
                measurement = Measurement(tuple(member.cases), member.counters)
                stages.accept(measurement, member.arm, member.draft)
        stages.finish(self.common)
        return [self._record(member) for member in self.members]

    def _measure(self, name: str) -> None:
        """Load and warm up the arms that have the case, and let them take turns."""
        seats: list[Seat] = []
        try:
            for member in self.members:
                case = member.case(name)
                if case is not None:
                    seats += self._seat(member, case)
            gc.collect()
            gc.freeze()
            self._alternate(seats, name)
            gc.unfreeze()
        finally:
            for seat in seats:
                seat.session.close()
        results = [merged(seat.turns, seat.places) for seat in seats]
        agree = len({r.outputs["digest"] for r in results if r.outputs is not None}) < 2
        for seat, result in zip(seats, results, strict=True):
            seat.member.cases.append(replace(result, values=None) if agree else result)

    def _seat(self, member: Member, case: Case) -> list[Seat]:
        """Load one arm with one case and one repeat, which is one turn."""
        from labkit.workload.cases import geometry, skip_reason

        whole = member.experiment.workload
        skipped = skip_reason(geometry(case, whole, member.experiment.engine.kv.block_size), whole)
        if skipped is not None:
            member.cases.append(CaseResult(case=case.name, skipped=skipped))
            return []
        workload = replace(whole, cases=[replace(case, factor=1)], repeats=1)
        with self._turn(member, "load"):
            session = stages.load(replace(member.experiment, workload=workload), self.common)
        with self._turn(member, "warm_up"):
            session.warm_up()
        return [Seat(member, session, whole.repeats * case.factor)]

    def _alternate(self, seats: Sequence[Seat], name: str) -> None:
        lead = self.common.record
        order = random.Random(f"labkit turns/{lead.seed}/{lead.block}/{name}")
        for turn in range(max((seat.repeats for seat in seats), default=0)):
            waiting = [seat for seat in seats if turn < seat.repeats]
            order.shuffle(waiting)
            for place, seat in enumerate(waiting):
                stages.use_threads(seat.member.experiment)
                with self._turn(seat.member, "measure"):
                    measurement = seat.session.measure(lambda what: None)
                seat.member.counters.update(measurement.counters)
                seat.turns += measurement.cases
                seat.places.append(place)

    @property
    def values(self) -> dict[str, NDArray[np.float32]]:
        """The outputs that arms do not agree on, by digest."""
        return {d: v for member in self.members for d, v in member.draft.values.items()}

    @contextmanager
    def _turn(self, member: Member, stage: str) -> Iterator[None]:
        """Time one arm's turn; it is to blame for what goes wrong in it."""
        self.culprit, self.common.watch.stage = member, stage
        with member.draft.watch.time(stage):
            yield
        self.culprit = None

    def _canary(self) -> None:
        with self.common.watch.time("canary"):
            self.common.note(canary="ok" if canary.check() else "no mlx")

    def _record(self, member: Member) -> Record:
        """Give an arm's record: its own, and an equal share of the seconds spent on all."""
        common, draft = self.common, member.draft
        if not common.record.ok:
            detail = common.record.detail or ""
            if self.culprit is not None and self.culprit is not member:
                detail = f"in one process with {self.culprit.draft.record.run}: {detail}"
            draft.fail(Failure(common.record.outcome, detail))
        draft.note(**common.record.notes, compiles=dict(common.compiles))
        draft.note(together=[m.draft.record.run for m in self.members])
        spent = {**common.watch.seconds, "total": common.watch.since_spawn()}
        shared = {stage: round(s / len(self.members), 6) for stage, s in spent.items()}
        return replace(
            draft.record,
            environment=common.record.environment,
            environment_end=common.record.environment_end,
            probe=common.record.probe,
            seconds={**draft.watch.seconds, **shared},
        )


def merged(turns: Sequence[CaseResult], places: Sequence[int]) -> CaseResult:
    """Put one arm's turns at a case together: all repeats, and the place of each turn."""
    last = turns[-1]
    metrics = tuple(
        replace(metric, repeats=tuple(x for turn in turns for x in turn.metrics[i].repeats))
        for i, metric in enumerate(last.metrics)
    )
    return replace(last, metrics=metrics, notes={**last.notes, "turns": list(places)})
