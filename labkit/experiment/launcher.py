"""Who carries out a run: a fresh process, or (in simulations) anything else."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from labkit.config import Engine, from_plain, own_classes
from labkit.experiment import StudyError, output_store, process
from labkit.experiment.blocks import Run
from labkit.experiment.cell import Cell, Paths
from labkit.experiment.progress import Progress
from labkit.machine import cache, fingerprint, threads
from labkit.machine.observer import Observer
from labkit.records import Arm, Record, RecordError, read

PREPARE_TIMEOUT_S = 1800.0


class Launcher(Protocol):
    """Does one run and gives its record; the runner publishes it."""

    def launch(self, run: Run, cell: Cell, paths: Paths) -> Record:
        """Do one run; a run that went wrong is a record too.

        Raises
        ------
        Interrupted
            A signal came; nothing of the run is left.
        StudyError, OSError
            No further run can work either (full disk, ...).
        """


@runtime_checkable
class Preparing(Protocol):
    """A launcher that has something to do before a cell's first run."""

    def prepare(self, cell: Cell, paths: Paths) -> None:
        """Build and compile what the cell's arms need."""


@runtime_checkable
class Together(Protocol):
    """A launcher that can do several arms' runs in one process."""

    def launch_together(self, runs: Sequence[Run], cell: Cell, paths: Paths) -> list[Record]:
        """Do a block's runs side by side; see :meth:`Launcher.launch`."""


def launch(launcher: Launcher, runs: Sequence[Run], cell: Cell, paths: Paths) -> list[Record]:
    """Do one run, or several in one process.

    Raises
    ------
    TypeError
        Several, and the launcher cannot.
    """
    if len(runs) == 1:
        return [launcher.launch(runs[0], cell, paths)]
    if not isinstance(launcher, Together):
        raise TypeError(f"{type(launcher).__name__} does one run per process")
    return launcher.launch_together(runs, cell, paths)


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

    def prepare(self, cell: Cell, paths: Paths) -> None:
        """Prepare every distinct arm in a process of its own, once per machine and code."""
        seen = set()
        for arm in cell.arms:
            marker = _marker(arm)
            if marker.exists() or marker in seen:
                continue
            seen.add(marker)
            self.progress.note(
                f"preparing arm {arm.name} (once: compiles and builds what it needs)"
            )
            log = paths.runs / f"prepare-{arm.name}.log"
            environ, _ = _environment(arm)
            ending = process.run(
                [*self.command, "--prepare", str(paths.arm(arm.name))],
                environment=environ,
                log=log,
                timeout_s=max(PREPARE_TIMEOUT_S, cell.design.timeout_s),
                on_tick=lambda pid: self.progress.tick(),
            )
            if ending.code == 0:
                _mark(marker, arm)
            else:
                why = process.last_lines(log, 1) or [ending.signal_name or f"exit {ending.code}"]
                self.progress.note(f"arm {arm.name} could not be prepared: {why[0]}")

    def launch(self, run: Run, cell: Cell, paths: Paths) -> Record:
        """Start the worker, watch it, and read or write its record."""
        return self.launch_together([run], cell, paths)[0]

    def launch_together(self, runs: Sequence[Run], cell: Cell, paths: Paths) -> list[Record]:
        """Start one worker for ``runs``; its log is that of the first."""
        arms = [cell.arm(run.arm) for run in runs]
        environ, removed = _environment(arms[0])
        pending = [paths.pending / f"{run.name}.json" for run in runs]
        pairs = zip((paths.arm(arm.name) for arm in arms), pending, strict=True)
        keep = ["--keep", str(cell.dir)] if runs[0].block == output_store.BLOCK else []
        observer = Observer()

        def tick(pid: int) -> None:
            observer.sample(pid)
            self.progress.tick()

        before, started = fingerprint.surroundings(), fingerprint.utc_now()
        ending = process.run(
            [*self.command, *(str(path) for pair in pairs for path in pair), *keep],
            environment=environ,
            log=paths.log(runs[0]),
            timeout_s=cell.design.timeout_s * len(runs),
            on_tick=tick,
        )
        after = fingerprint.surroundings()
        notes = {
            "isolation": cell.design.isolation.value,
            "observer": observer.report(),
            "removed_environment": removed,
            **self._order(arms[-1].name, ending.wall_s),
        }
        shared = {"process": round(ending.wall_s / len(runs), 6)}
        log = paths.log(runs[0])
        records = []
        for run, path in zip(runs, pending, strict=True):
            extra: dict[str, Any] = {"config": config_digest(cell.arm(run.arm))}
            found = _collect(path, log, ending, paths)
            if isinstance(found, Record):
                if ending.code != 0:
                    extra["exit"] = ending.signal_name or ending.code
            else:
                extra["log_tail"] = process.last_lines(log)
                found = _without(run, cell, found, started, ending.wall_s / len(runs))
            found = replace(
                found,
                environment={**found.environment, **before},
                environment_end={**found.environment_end, **after},
                notes={**found.notes, **notes, **extra},
                seconds={**found.seconds, **shared},
            )
            records.append(found)
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


def _without(run: Run, cell: Cell, ended: tuple[str, str], started: str, seconds: float) -> Record:
    """Make the record of a run that left none: outcome and detail say how it ended."""
    return Record(
        run.arm,
        cell.arm(run.arm).role,
        run.block,
        run.position,
        cell.seed,
        outcome=ended[0],
        detail=ended[1],
        started=started,
        environment=fingerprint.take(),
        seconds={"total": round(seconds, 6)},
    )


def _collect(
    pending: Path, log: Path, ending: process.Ending, paths: Paths
) -> Record | tuple[str, str]:
    """Take the worker's record, or say the outcome and detail of a run without one."""
    if ending.code == os.EX_IOERR:
        lines = process.last_lines(log, 1) or ["the worker cannot write its record"]
        raise StudyError(lines[0])
    last = (process.last_lines(log, 1) or ["nothing in its log"])[0]
    if ending.timed_out:
        return "timeout", f"killed after {ending.wall_s:.0f} s: {last}"
    if pending.exists():
        try:
            record = read(pending)
        except RecordError as error:
            set_aside(pending, paths)
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


def set_aside(path: Path, paths: Paths) -> Path:
    """Move a file to ``runs/abandoned`` under a name that nothing there has."""
    paths.abandoned.mkdir(parents=True, exist_ok=True)
    target = paths.abandoned / path.name
    number = 1
    while target.exists():
        target = paths.abandoned / f"{path.stem}~{number}{path.suffix}"
        number += 1
    return path.rename(target)


def _environment(arm: Arm) -> tuple[dict[str, str], list[str]]:
    engine, cores = from_plain(Engine, arm.config.get("engine", {})), threads.core_count()
    environ, removed = threads.worker_environment(
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
    facts = (fingerprint.versions(), sys.version, dict(arm.config), _cpu())
    digest.update(repr(facts).encode())
    return cache.root() / "numba" / f"prepared-{digest.hexdigest()[:32]}"


def _cpu() -> str:
    return str(fingerprint.facts().get("cpu_model"))


def _mark(marker: Path, arm: Arm) -> None:
    """Remember that an arm is prepared; not where its code is the user's and may change."""
    if not own_classes(from_plain(Engine, arm.config.get("engine", {}))):
        cache.atomic_write(marker, f"{time.time():.0f}\n".encode())
