"""A worker process: all stages for one arm, or for all arms of a block interleaved.

An arm that is alone in its process may take turns with arms in other processes
(:mod:`labkit.experiment.launch.turn_coordinator`).

Interleaving is the finest pairing: a disturbance of the machine that lasts a second affects all
arms alike. Properties of the process (where its code and memory lie) also affect all of them, so
the process is the unit of inference. An interleaved block is one process, with one run and one
record per arm. An arm alone in its process runs the same code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from labkit.config import Experiment, is_class_path, user_classes
from labkit.engine.user_classes import installed_versions
from labkit.experiment.worker import mlx_known_answer_test, worker_setup
from labkit.experiment.worker.granted_turns import GrantedTurns
from labkit.experiment.worker.run_draft import RunDraft, StageTimer
from labkit.experiment.worker.run_failures import RunFailure
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.experiment.worker.worker_setup import experiment_of
from labkit.experiment.worker.worker_status import WorkerStatus
from labkit.machine.facts import machine_snapshot
from labkit.records import Arm, Record
from labkit.workload.workload_protocols import MachineKernels, PilotedArms, TurnContext

if TYPE_CHECKING:
    from labkit.workload.workload_protocols import Measurement


@dataclass
class ArmRun:
    """One arm's run in the process: the draft of its record, the arm and its config."""

    draft: RunDraft
    arm: Arm
    experiment: Experiment

    @cached_property
    def threads(self) -> int:
        """The arm's thread budget, cached because counting cores takes longer than a turn."""
        return worker_setup.thread_budget(self.experiment)


class WorkerProcess:
    """The process with one arm, or with all arms of a block.

    ``shared``: the draft of the stages and facts that all arms share. ``running``: the arm that
    is being measured; None outside the arms' turns. ``granted``: the source of this process's turns
    if it takes turns with other processes; else None. ``status``: what the parent can see of this
    process while it runs, and after it has died.
    """

    def __init__(
        self,
        records: Sequence[Record],
        arms: Sequence[Arm],
        timer: StageTimer,
        granted: GrantedTurns | None = None,
        status: WorkerStatus | None = None,
    ) -> None:
        self.granted = granted
        self.status = WorkerStatus() if status is None else status
        self.shared = RunDraft(records[0], timer)
        self.runs = [
            ArmRun(RunDraft(record, StageTimer(timer.spawned_ns)), arm, experiment_of(arm))
            for record, arm in zip(records, arms, strict=True)
        ]
        self.running: ArmRun | None = None

    def run(self) -> list[Record]:
        """Run all stages and return every arm's record, even if a stage fails."""
        with self.shared.catch_failures():
            self._run_stages()
        with self.shared.stage("fingerprint"):
            self.shared.set(environment_end=machine_snapshot.state())
        return [self._record(run) for run in self.runs]

    def _run_stages(self) -> None:
        """Run the stages in the order of :mod:`labkit.experiment.worker.worker_setup`."""
        shared = self.shared
        with shared.stage("fingerprint"):
            shared.set(environment=self._environment())
        with shared.stage("numba"):
            probe = self._start_probe()
        if self.granted is not None:
            self.granted.ask("hello", VERSION, "probe")
        self._time_probe(probe, "before")
        measurements = self._measure(probe)
        self._time_probe(probe, "after")
        self._measure_peak_rates()
        for run, measurement in zip(self.runs, measurements, strict=True):
            run.draft.add_measurement(measurement, run.arm)

    def _measure(self, probe: Any) -> Sequence[Measurement]:
        """Load the arms, warm up, measure and close them. MLX is tested before and after."""
        shared, show = self.shared, self.status.show
        if self.granted is not None:
            self.granted.ask("probed", None, "load")
        show("loading")
        with shared.stage("load"):
            arms = worker_setup.load(self._experiments, self._setting(probe), shared.note)
        with closing(arms):
            if self.granted is not None:
                self.granted.ask("loaded", None, "warm_up")
            self._test_known_answers()
            show("warming up")
            with shared.stage("warm_up"):
                arms.warm_up()
            show("measuring")
            with shared.stage("measure"):
                measurements = arms.measure(show)
            show("checking")
            self._test_known_answers()
        return measurements

    def _time_probe(self, probe: Any, when: str) -> None:
        with self.shared.stage("probe"):
            self.shared.set(probe={**self.shared.record.probe, when: probe.time()})

    def prepare(self) -> RunFailure | None:
        """Compile, build and cache what the arms' runs need, without measuring.

        Returns what the runs would record as their failure; None if nothing failed.
        """
        with self.shared.catch_failures():
            self._prepare()
        record = self.shared.record
        return None if record.ok else RunFailure(record.outcome, record.detail or "")

    def _prepare(self) -> None:
        from labkit import workload

        shared = self.shared
        with shared.stage("numba"):
            probe = self._start_probe()
        with shared.stage("probe"):
            probe.time()
        with shared.stage("load"):
            for experiment in self._experiments:
                workload.prepare(experiment)
            arms = worker_setup.load(self._experiments, self._setting(probe), shared.note)
        with closing(arms), shared.stage("warm_up"):
            arms.prepare()
        self._measure_peak_rates()

    def pilot(self, seconds: float) -> dict[str, Any]:
        """Return a ``CellPilot``: costs of the process and each case, in rounds of ``seconds``."""
        probe = self._start_probe()
        probe.time()
        arms = worker_setup.load(self._experiments, self._setting(probe), self.shared.note)
        if not isinstance(arms, PilotedArms):
            raise TypeError(f"{type(arms).__name__} has no pilot")
        with closing(arms):
            loaded = self.shared.timer.since_spawn()
            cases = arms.pilot(seconds)
        measured = self.shared.timer.since_spawn()
        probe.time()
        machine_snapshot.take()
        others_s = loaded + self.shared.timer.since_spawn() - measured
        return {"start_s": others_s, "cases": [asdict(case) for case in cases]}

    def _environment(self) -> dict[str, Any]:
        """Return the machine and the software, with the versions of installed classes of users."""
        taken = machine_snapshot.take()
        kinds = [run.experiment.workload.kind for run in self.runs]
        paths = {path for run in self.runs for path in user_classes(run.experiment.engine).values()}
        for path in sorted(paths.union(filter(is_class_path, kinds))):
            versions = installed_versions(path.partition(":")[0])
            taken["versions"] = {**taken.get("versions", {}), **versions}
        return taken

    @property
    def _experiments(self) -> list[Experiment]:
        return [run.experiment for run in self.runs]

    def _start_probe(self) -> Any:
        probe, pool = worker_setup.start_probe(self.shared.count_compilation)
        self.shared.note(pool=pool)
        return probe

    def _test_known_answers(self) -> None:
        with self.shared.stage("canary"):
            self.shared.note(canary="ok" if mlx_known_answer_test.check() else "no mlx")

    def _measure_peak_rates(self) -> None:
        experiment = self.runs[0].experiment
        if worker_setup.needs_peak_rates(experiment, self.shared.record.block):
            with self.shared.stage("limits"):
                self.shared.note(limits=worker_setup.measure_peak_rates(experiment))

    def _setting(self, machine: MachineKernels) -> TurnContext:
        first = self.shared.record
        order = random.Random(f"labkit turns/{first.seed}/{first.block}/{first.position}")
        roles = [run.arm.role for run in self.runs]
        baseline = roles.index("baseline") if "baseline" in roles else None
        return TurnContext(first.seed, order, self._turn, machine, self.granted, baseline)

    @contextmanager
    def _turn(self, arm: int) -> Iterator[None]:
        """Run one turn of an arm: apply its thread budget and time the body.

        If the body raises or ends the process, ``running`` and the status still name this arm, so
        the failure is attributed to it.
        """
        self.status.begin_turn(arm)
        run = self.running = self.runs[arm]
        worker_setup.apply_thread_budget(run.threads)
        if self.granted is not None:
            worker_setup.forget_own_stop()
        with run.draft.stage("turns"):
            yield
        self.running = None
        self.status.end_turn()

    def _record(self, run: ArmRun) -> Record:
        """Return an arm's record. The arms share the seconds of common stages equally."""
        shared, draft = self.shared, run.draft
        if not shared.record.ok:
            detail = shared.record.detail or ""
            if self.running is not None and self.running is not run:
                culprit = self.running.draft.record.run
                detail = f"in one process with {culprit}: {detail}"
                draft.note(failed_by=culprit)
            draft.fail(RunFailure(shared.record.outcome, detail))
        draft.note(**shared.record.notes, compiles=dict(shared.compiles))
        if len(self.runs) > 1:
            draft.note(together=[other.draft.record.run for other in self.runs])
        spent = {**shared.timer.seconds, "total": shared.timer.since_spawn()}
        share = {stage: round(s / len(self.runs), 6) for stage, s in spent.items()}
        return replace(
            draft.record,
            environment=shared.record.environment,
            environment_end=shared.record.environment_end,
            probe=shared.record.probe,
            seconds={**share, **draft.timer.seconds},
        )
