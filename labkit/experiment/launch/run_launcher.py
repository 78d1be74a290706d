"""Run launchers: carry out runs in fresh worker processes, and collect their records."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from labkit.config import Engine, Isolation, from_plain
from labkit.experiment import StudyError
from labkit.experiment.cell import ReadyCell
from labkit.experiment.launch import child_process, failed_run_records, turn_coordinator
from labkit.experiment.launch.compile_once_marker import marker_path, write_marker
from labkit.experiment.launch.python_environment import PythonEnvironment
from labkit.experiment.launch.turn_coordinator import LONG_SLICE_S, SLICE_S, LiveCommand
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import Progress
from labkit.experiment.worker import output_array_files
from labkit.experiment.worker.run_failures import RunFailure
from labkit.experiment.worker.worker_status import SharedStatus
from labkit.machine import worker_environment
from labkit.machine.facts import code_revision, machine_snapshot
from labkit.machine.facts.machine_observer import MachineObserver
from labkit.machine.processes.listening_processes import (
    NoListener,
    find_listeners,
    is_on_this_machine,
)
from labkit.records import Arm, Record
from labkit.workload import in_process_rules

PREPARE_TIMEOUT_S = 1800.0
WORKER_COMMAND = (sys.executable, "-m", "labkit.experiment.worker")


class RunLauncher(Protocol):
    """Carries out runs and returns their records. Simulations implement it without processes."""

    def prepare(self, cell: ReadyCell) -> None:
        """Build and compile what the cell's arms need, before their first run."""

    def pilot(self, cell: ReadyCell, seconds: float) -> Mapping[str, Any] | None:
        """Measure what a process of the cell costs, and return it as JSON; None if it fails.

        The rounds of all cases take about ``seconds``. Arms that do not share a process are
        represented by one of them. ``suspended_s`` in the result: the seconds in which ctrl-Z
        suspended this process meanwhile, if any.
        """

    def launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
        """Do one run, or all runs that share a process; return all records, including failed ones.

        Raises ``Interrupted`` after a signal; no process of the runs is left. Raises ``StudyError``
        or ``OSError`` for an error that would also stop every further run (full disk, ...).
        """


@dataclass
class LaunchHistory:
    """What the launchers of one study have done: the arms they prepared, and the last run.

    Arms are named by their marker files (``compile_once_marker``). The keys of ``failures`` are
    the arms that a process was to prepare together: any of them may be the cause, so an arm that is
    among other arms in a later cell is prepared again.
    """

    prepared: set[Path] = field(default_factory=set)  # also of arms whose marker is not written
    failures: dict[frozenset[Path], RunFailure] = field(default_factory=dict)
    previous: tuple[str, float] | None = None  # the last arm, and when it ended


class ProcessLauncher:
    """``design.isolation=process``: a fresh process for each run.

    The command line is ``command arms/ARM.json runs/pending/RUN.json``.
    """

    # Whether processes are alive together, each of which is stopped without a turn and by ctrl-Z.
    live_processes = False

    def __init__(
        self,
        command: Sequence[str] = WORKER_COMMAND,
        progress: Progress | None = None,
        history: LaunchHistory | None = None,
    ) -> None:
        self.command = tuple(command)
        self.progress = Progress() if progress is None else progress
        self._history = LaunchHistory() if history is None else history
        self._unprepared: dict[str, RunFailure] = {}  # by arm of the current cell

    def prepare(self, cell: ReadyCell) -> None:
        """Prepare arms, except those prepared earlier with the same code; a failure fails runs."""
        markers = {arm.name: marker_path(arm) for arm in cell.arms}
        new: dict[Path, Arm] = {}
        for name, marker in markers.items():
            if not marker.exists() and marker not in self._history.prepared:
                new.setdefault(marker, cell.arm(name))
        self._unprepared = {}
        for arms in self._preparations(new):
            together, failures = frozenset(arms), self._history.failures
            if together not in failures:
                self._prepare(arms, cell)
            if together in failures:
                names = (name for name, marker in markers.items() if marker in together)
                self._unprepared |= dict.fromkeys(names, failures[together])

    def _preparations(self, new: Mapping[Path, Arm]) -> list[Mapping[Path, Arm]]:
        """Divide the arms to prepare among processes."""
        return [{marker: arm} for marker, arm in new.items()]

    def _prepare(self, arms_by_marker: Mapping[Path, Arm], cell: ReadyCell) -> None:
        names = [arm.name for arm in arms_by_marker.values()]
        arms = ("arm " if len(names) == 1 else "arms ") + ", ".join(names)
        self.progress.note(f"preparing {arms} (once; this compiles and builds what the runs need)")
        log = cell.paths.runs / f"prepare-{names[0]}.log"
        files = (str(cell.paths.arm(name)) for name in names)
        start_s = _start_limit_s(cell.arm(names[0]))  # a server shares no process
        ending = child_process.run(
            [*self._command(cell.arm(names[0])), "--prepare", *files],
            environment=_worker_variables(cell.arm(names[0])).values,
            log=log,
            timeout_s=max(PREPARE_TIMEOUT_S, cell.design.timeout_s) + start_s,
            on_tick=lambda pid: self.progress.tick(),
        )
        failure = failed_run_records.preparation_failure(ending, log)
        if failure is None:
            for marker, arm in arms_by_marker.items():
                write_marker(marker, arm)
            self._history.prepared |= arms_by_marker.keys()
            return
        self.progress.note(f"{arms} could not be prepared: {failure.detail}; the log is {log}")
        if not any(arm.out_of_memory for arm in arms_by_marker.values()):
            self._history.failures[frozenset(arms_by_marker)] = failure

    def pilot(self, cell: ReadyCell, seconds: float) -> Mapping[str, Any] | None:
        self.progress.note("pilot: how long launches take here, and how much they vary")
        path = cell.paths.pending / "pilot.json"
        arms = cell.arms if cell.design.isolation is Isolation.in_process else [_newest(cell.arms)]
        files = (str(cell.paths.arm(arm.name)) for arm in arms)
        ending = child_process.run(
            [*self.command, "--pilot", str(path), "--seconds", f"{seconds:g}", *files],
            # This labkit, not that of an arm's revision, which may have no pilot.
            environment=_worker_variables(replace(arms[0], environment={})).values,
            log=cell.paths.runs / "pilot.log",
            timeout_s=cell.design.timeout_s,
            on_tick=lambda pid: self.progress.tick(),
        )
        if ending.code != 0:
            return None
        pilot = json.loads(path.read_text("utf-8"))
        path.unlink()
        return {**pilot, "suspended_s": ending.suspended_s}

    def launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
        """Start the workers of ``runs``, but for arms that are not prepared, and return records."""
        ready = self._ready(runs)
        unprepared = [run for run in runs if run not in ready]
        failures = {name: self._preparation_failure(name, cell) for name in self._unprepared}
        failed = failed_run_records.failed(unprepared, cell, failures) if unprepared else []
        return [*failed, *(self._launch(ready, cell) if ready else ())]

    def _preparation_failure(self, arm: str, cell: ReadyCell) -> RunFailure:
        failure, log = self._unprepared[arm], cell.paths.runs / f"prepare-{arm}.log"
        shown = str(log.relative_to(cell.dir)) if log.exists() else None
        return RunFailure(failure.outcome, f"its preparation failed: {failure.detail}", shown)

    def _ready(self, runs: Sequence[Run]) -> Sequence[Run]:
        return [run for run in runs if run.arm not in self._unprepared]

    def _launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
        arms = [cell.arm(run.arm) for run in runs]
        observer = MachineObserver(_running_servers(arms))
        before, started = machine_snapshot.surroundings(), machine_snapshot.utc_now()
        endings, in_turn = self._run_workers(runs, cell, observer)
        wall_s = max(ending.wall_s for ending in endings)
        suspended_s = max(ending.suspended_s for ending in endings)
        after = machine_snapshot.surroundings()
        seconds = round(wall_s / len(runs), 6)
        notes = {
            "isolation": cell.design.isolation.value,
            "observer": observer.report(),
            "removed_environment": _worker_variables(arms[0]).removed,
            **({"together": [run.name for run in runs]} if self.live_processes else {}),
            **self._order_notes(arms[-1].name, wall_s + suspended_s),
        }
        records = []
        for run, arm, ending in zip(runs, arms, endings, strict=True):
            log = cell.paths.log(run if self.live_processes else runs[0])
            record = failed_run_records.collect(run, cell, ending, log, started, seconds, in_turn)
            where = {} if record.ok else {"log": str(log.relative_to(cell.dir))}
            config = json.dumps(dict(arm.config), sort_keys=True).encode()
            where["config"] = hashlib.sha256(config).hexdigest()[:16]
            records.append(
                replace(
                    record,
                    environment={**record.environment, **before, **_tree_state(arm)},
                    environment_end={**record.environment_end, **after, **_tree_state(arm)},
                    notes={**record.notes, **notes, **where},
                    seconds=self._seconds(record, seconds, suspended_s / len(runs)),
                )
            )
        return records

    def _seconds(self, record: Record, process_s: float, suspended_s: float) -> dict[str, float]:
        """Return a record's seconds with its share of the launch's, and those lost to ctrl-Z."""
        if not suspended_s:
            return {**record.seconds, "process": process_s}
        elapsed_s = process_s + suspended_s
        if not self.live_processes:  # the worker went on, and has counted its seconds itself
            process_s = max(process_s, record.seconds.get("total", 0.0))
        lost_s = max(0.0, round(elapsed_s - process_s, 6))
        return {**record.seconds, "process": process_s, "suspended": lost_s}

    def _run_workers(
        self, runs: Sequence[Run], cell: ReadyCell, observer: MachineObserver
    ) -> tuple[list[child_process.ProcessExit], Run | None]:
        """Return the end of each run's process, and the run that had the turn last in a shared one.

        None: no process is shared, or it is unknown.
        """
        arm = cell.arm(runs[0].arm)
        with SharedStatus() as status:
            ending = child_process.run(
                [*self._command(arm), *_arguments(runs, cell)],
                environment=_worker_variables(arm).values | status.environment,
                log=cell.paths.log(runs[0]),
                timeout_s=cell.design.timeout_s * len(runs) + _start_limit_s(arm),
                on_tick=self._ticker(runs, [status], observer),
                pass_fds=(status.fd,),
            )
            turn = status.turn if len(runs) > 1 else None
            holder = runs[turn] if turn is not None and turn < len(runs) else None
            return [ending] * len(runs), holder

    def _ticker(
        self, runs: Sequence[Run], statuses: Sequence[SharedStatus], observer: MachineObserver
    ) -> Callable[[int], None]:
        def tick(pid: int) -> None:
            observer.sample(pid)
            self.progress.working(_work_text(runs, statuses))
            self.progress.tick()

        return tick

    def _command(self, arm: Arm) -> list[str]:
        return PythonEnvironment.of(arm.environment).command(self.command)

    def _order_notes(self, arm: str, wall_s: float) -> dict[str, Any]:
        """Note which arm ran before this process, and the idle seconds since; remember ``arm``."""
        ended, previous = time.monotonic(), self._history.previous
        self._history.previous = (arm, ended)
        if previous is None:
            return {}
        return {"predecessor": previous[0], "gap_s": round(ended - wall_s - previous[1], 3)}


class InProcessLauncher(ProcessLauncher):
    """``design.isolation=in_process``: one fresh process for all runs of a launch."""

    def _preparations(self, new: Mapping[Path, Arm]) -> list[Mapping[Path, Arm]]:
        return [new] if new else []

    def _ready(self, runs: Sequence[Run]) -> Sequence[Run]:
        return runs if len(super()._ready(runs)) == len(runs) else []


class LiveLauncher(ProcessLauncher):
    """``design.isolation=live``: a fresh process for each run; those of a launch take turns."""

    live_processes = True

    def _run_workers(
        self, runs: Sequence[Run], cell: ReadyCell, observer: MachineObserver
    ) -> tuple[list[child_process.ProcessExit], Run | None]:
        with ExitStack() as stack:
            statuses = [stack.enter_context(SharedStatus()) for _ in runs]
            tick = self._ticker(runs, statuses, observer)
            return self._run_together(runs, cell, statuses, lambda: tick(os.getpid())), None

    def _run_together(
        self,
        runs: Sequence[Run],
        cell: ReadyCell,
        statuses: Sequence[SharedStatus],
        tick: Callable[[], None],
    ) -> list[child_process.ProcessExit]:
        commands = {
            run.arm: LiveCommand(
                (*self._command(cell.arm(run.arm)), *_arguments([run], cell)),
                _worker_variables(cell.arm(run.arm)).values,
                cell.paths.log(run),
                status,
                cell.design.timeout_s + _start_limit_s(cell.arm(run.arm)),
                _paused_servers(cell.arm(run.arm)),
            )
            for run, status in zip(runs, statuses, strict=True)
        }
        order = random.Random(f"labkit live turns/{cell.seed}/{runs[0].block}")
        engines = [_engine(cell.arm(run.arm)) for run in runs]
        long = any(engine.name == "openai" for engine in engines)
        return turn_coordinator.run(
            commands,
            order=order,
            on_tick=tick,
            slice_s=LONG_SLICE_S if long else SLICE_S,
            load_together=in_process_rules.live_budget(engines) is None,
        )


class WorkerLauncher:
    """Launches the runs of every cell as the cell's ``design.isolation`` says.

    ``history``: that of the study, if other launchers have run cells of it.
    """

    def __init__(
        self,
        command: Sequence[str] = WORKER_COMMAND,
        progress: Progress | None = None,
        history: LaunchHistory | None = None,
    ) -> None:
        history = LaunchHistory() if history is None else history
        self._launchers = {
            isolation: kind(command, progress, history) for isolation, kind in LAUNCHERS.items()
        }

    def of(self, cell: ReadyCell) -> ProcessLauncher:
        """Return the launcher of a cell's isolation."""
        return self._launchers[cell.design.isolation]

    def prepare(self, cell: ReadyCell) -> None:
        self.of(cell).prepare(cell)

    def pilot(self, cell: ReadyCell, seconds: float) -> Mapping[str, Any] | None:
        return self.of(cell).pilot(cell, seconds)

    def launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
        return self.of(cell).launch(runs, cell)


LAUNCHERS: dict[Isolation, type[ProcessLauncher]] = {
    Isolation.process: ProcessLauncher,
    Isolation.in_process: InProcessLauncher,
    Isolation.live: LiveLauncher,
}


def _newest(arms: Sequence[Arm]) -> Arm:
    """Return an arm whose options this version of labkit has: the last one that has costs."""
    tested = (arm for arm in reversed(arms) if arm.role == "arm" and not arm.out_of_memory)
    return next(tested, arms[0])


def _tree_state(arm: Arm) -> dict[str, Any]:
    """Return ``git_changes`` of an arm that imports labkit from a revision, which has none."""
    environment = PythonEnvironment.of(arm.environment)
    return {"git_changes": code_revision.CLEAN} if environment.replaces_labkit else {}


def _arguments(runs: Sequence[Run], cell: ReadyCell) -> Iterator[str]:
    for run in runs:
        yield from (str(cell.paths.arm(run.arm)), str(cell.paths.pending_record(run)))
    if runs[0].block == output_array_files.BLOCK:
        yield from ("--keep", str(cell.dir))


def _work_text(runs: Sequence[Run], statuses: Sequence[SharedStatus]) -> str:
    """Return what the workers do: ``loading base``, or a count such as ``8 of 32 requests``."""
    in_turn = [status for status in statuses if status.turn is not None]
    status = (in_turn or statuses)[0]
    text, turn = status.text, status.turn
    if not text or turn is None or len(runs) == 1 or text[0].isdigit():
        return text
    run = runs[turn] if len(statuses) == 1 else runs[statuses.index(status)]
    return f"{text} {run.arm}"


class _WorkerVariables(NamedTuple):
    """A worker's environment variables, and the names of those that it does not inherit."""

    values: dict[str, str]
    removed: list[str]


def _worker_variables(arm: Arm) -> _WorkerVariables:
    engine = _engine(arm)
    cores = worker_environment.core_count()
    environ, removed = worker_environment.worker_environment(
        os.environ, threads=engine.threads or cores, cores=cores
    )
    environ = PythonEnvironment.of(arm.environment).variables(environ)
    return _WorkerVariables(environ | engine.mlx.environment(), removed)


def _engine(arm: Arm) -> Engine:
    return from_plain(Engine, arm.config.get("engine", {}))


def _start_limit_s(arm: Arm) -> float:
    """Return the seconds that an arm's server may take to start, beside those of its run."""
    engine = _engine(arm)
    return engine.server.start_limit_s if engine.name == "openai" else 0.0


def _running_servers(arms: Sequence[Arm]) -> list[int] | None:
    """Return the ids of this machine's servers at ``engine.server.url``; None if one is unknown."""
    urls = {url for arm in arms if (url := _engine(arm).server.url) is not None}
    here = filter(is_on_this_machine, urls)
    try:
        return sorted({pid for url in here for pid in find_listeners(url)})
    except NoListener:
        return None


def _paused_servers(arm: Arm) -> tuple[int, ...]:
    """Return the ids of the server processes that are stopped while the arm has no turn."""
    server = _engine(arm).server
    if server.url is None or not server.pause:
        return ()
    try:
        return tuple(find_listeners(server.url))
    except NoListener as error:
        raise StudyError(f"arm {arm.name}: engine.server.url={server.url}: {error}") from None
