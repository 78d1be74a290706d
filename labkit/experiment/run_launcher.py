"""Who carries out a run: a fresh process, or (in simulations) anything else."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from labkit.config import Engine, Isolation, from_plain, own_classes
from labkit.experiment import StudyError, child_process, differing_outputs
from labkit.experiment.cell import Cell
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import Progress
from labkit.machine import cache_dir, fingerprint, worker_environment
from labkit.machine.machine_observer import MachineObserver
from labkit.records import Arm, Record, RecordError, read_record

PREPARE_TIMEOUT_S = 1800.0
NO_LOG = "nothing in its log"


class RunLauncher(Protocol):
    """Carries out runs; the runner publishes their records."""

    def prepare(self, cell: Cell) -> None:
        """Build and compile what the cell's arms need, before its first run."""

    def launch(self, runs: Sequence[Run], cell: Cell) -> list[Record]:
        """Do one run, or the runs that share a process; one that went wrong is a record too.

        Raises
        ------
        Interrupted
            A signal came; nothing of the runs is left.
        StudyError, OSError
            No further run can work either (full disk, ...).
        """


class ProcessLauncher:
    """One fresh process per run: ``command arms/ARM.json runs/pending/RUN.json ...``."""

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "labkit.experiment.worker"),
        progress: Progress | None = None,
    ) -> None:
        self.command = tuple(command)
        self.progress = Progress() if progress is None else progress
        self._previous: tuple[str, float] | None = None  # the arm before, and when it ended

    def prepare(self, cell: Cell) -> None:
        """Prepare every distinct arm, once per machine and code.

        Arms that take turns share a process here, too; others have one each.
        """
        arms: dict[Path, Arm] = {}
        for arm in cell.arms:
            arms.setdefault(_marker(arm), arm)
        new = {marker: arm for marker, arm in arms.items() if not marker.exists()}
        if cell.design.isolation is Isolation.in_process and new:
            self._prepare(new, cell)
            return
        for marker, arm in new.items():
            self._prepare({marker: arm}, cell)

    def _prepare(self, arms: Mapping[Path, Arm], cell: Cell) -> None:
        """Prepare arms, by their markers, in one process."""
        names = [arm.name for arm in arms.values()]
        said = ("arm " if len(names) == 1 else "arms ") + ", ".join(names)
        self.progress.note(f"preparing {said} (once: compiles and builds what is needed)")
        log = cell.paths.runs / f"prepare-{names[0]}.log"
        environ, _ = _environment(cell.arm(names[0]))
        ending = child_process.run(
            [*self.command, "--prepare", *(str(cell.paths.arm(name)) for name in names)],
            environment=environ,
            log=log,
            timeout_s=max(PREPARE_TIMEOUT_S, cell.design.timeout_s),
            on_tick=lambda pid: self.progress.tick(),
        )
        if ending.code == 0:
            for marker, arm in arms.items():
                _mark(marker, arm)
        else:
            why = child_process.last_lines(log, 1) or [ending.signal_name or f"exit {ending.code}"]
            self.progress.note(f"{said} could not be prepared: {why[0]}")

    def launch(self, runs: Sequence[Run], cell: Cell) -> list[Record]:
        """Start one worker for ``runs``, watch it, and take or make their records."""
        arms = [cell.arm(run.arm) for run in runs]
        environ, removed = _environment(arms[0])
        log, observer = cell.paths.log(runs[0]), MachineObserver()

        def tick(pid: int) -> None:
            observer.sample(pid)
            self.progress.tick()

        before, started = fingerprint.surroundings(), fingerprint.utc_now()
        ending = child_process.run(
            [*self.command, *_words(runs, cell)],
            environment=environ,
            log=log,
            timeout_s=cell.design.timeout_s * len(runs),
            on_tick=tick,
        )
        after = fingerprint.surroundings()
        seconds = round(ending.wall_s / len(runs), 6)
        notes = {
            "isolation": cell.design.isolation.value,
            "observer": observer.report(),
            "removed_environment": removed,
            **self._order(arms[-1].name, ending.wall_s),
        }
        records = []
        for run, arm in zip(runs, arms, strict=True):
            found = _record(run, cell, ending, log, started, seconds)
            records.append(
                replace(
                    found,
                    environment={**found.environment, **before},
                    environment_end={**found.environment_end, **after},
                    notes={**found.notes, **notes, "config": config_digest(arm)},
                    seconds={**found.seconds, "process": seconds},
                )
            )
        return records

    def _order(self, arm: str, wall_s: float) -> dict[str, Any]:
        """Say which arm ran before this process, and how long (s) the machine rested since."""
        ended, previous = time.monotonic(), self._previous
        self._previous = (arm, ended)
        if previous is None:
            return {}
        return {"predecessor": previous[0], "gap_s": round(ended - wall_s - previous[1], 3)}


def config_digest(arm: Arm) -> str:
    """Return a hash of the arm's resolved config."""
    text = json.dumps(arm.to_json()["config"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(runs: Sequence[Run], cell: Cell) -> Iterator[str]:
    """Yield the worker's arguments: each run's arm and record, and where to store outputs."""
    for run in runs:
        yield from (str(cell.paths.arm(run.arm)), str(cell.paths.pending_record(run)))
    if runs[0].block == differing_outputs.BLOCK:
        yield from ("--keep", str(cell.dir))


def _record(
    run: Run, cell: Cell, ending: child_process.ProcessExit, log: Path, started: str, seconds: float
) -> Record:
    """Take the worker's record, or make one that says how the run ended without."""
    found = _collect(run, cell, ending, log)
    if isinstance(found, Record):
        status = {} if ending.code == 0 else {"exit": ending.signal_name or ending.code}
        return replace(found, notes={**found.notes, **status})
    outcome, detail = found
    return Record(
        run.arm,
        cell.arm(run.arm).role,
        run.block,
        run.position,
        cell.seed,
        outcome=outcome,
        detail=detail,
        started=started,
        environment=fingerprint.take(),
        seconds={"total": seconds},
        notes={"log_tail": child_process.last_lines(log)},
    )


def _collect(
    run: Run, cell: Cell, ending: child_process.ProcessExit, log: Path
) -> Record | tuple[str, str]:
    """Take the worker's record, or say the outcome and detail of a run without one."""
    if ending.code == os.EX_IOERR:
        lines = child_process.last_lines(log, 1) or ["the worker cannot write its record"]
        raise StudyError(lines[0])
    pending, last = (
        cell.paths.pending_record(run),
        (child_process.last_lines(log, 1) or [NO_LOG])[0],
    )
    if ending.timed_out:
        return "timeout", f"killed after {ending.wall_s:.0f} s: {last}"
    if pending.exists():
        try:
            record = read_record(pending)
        except RecordError as error:
            cell.paths.move_to_abandoned(pending)
            return "invalid_output", str(error).replace(f"{pending.parent}{os.sep}", "")
        pending.unlink()
        return record
    if ending.out_of_memory:
        return "oom", "killed by the kernel for want of memory"
    if ending.signal_name is not None:
        return "crashed", f"{ending.signal_name}: {last}"
    if ending.code == 0:
        return "crashed", "the worker ended without a record"
    return "crashed", f"exit status {ending.code}: {last}"


def _environment(arm: Arm) -> tuple[dict[str, str], list[str]]:
    engine, cores = (
        from_plain(Engine, arm.config.get("engine", {})),
        worker_environment.core_count(),
    )
    environ, removed = worker_environment.worker_environment(
        os.environ, threads=engine.threads or cores, cores=cores
    )
    return environ | engine.mlx.environment(), removed


def _marker(arm: Arm) -> Path:
    """Name the file that says "prepared", after all that compiled code depends on.

    It lies beside numba's cache, so that deleting the cache deletes it too.
    """
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path).encode())
        digest.update(path.read_bytes())
    cpu = str(fingerprint.facts().get("cpu_model"))
    facts = (fingerprint.versions(), sys.version, dict(arm.config), cpu)
    digest.update(repr(facts).encode())
    return cache_dir.root() / "numba" / f"prepared-{digest.hexdigest()[:32]}"


def _mark(marker: Path, arm: Arm) -> None:
    """Remember that an arm is prepared; not where its code is the user's and may change."""
    if not own_classes(from_plain(Engine, arm.config.get("engine", {}))):
        cache_dir.atomic_write(marker, f"{time.time():.0f}\n".encode())
