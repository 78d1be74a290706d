"""Runs a cell: block by block, one fresh process per run, and nothing is ever lost.

A block is done when all its records exist. The same command on the same folder runs
what is missing: records of an unfinished block move to ``runs/abandoned`` and the whole
block is run again, for half a block is no randomised comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from labkit.experiment.cell import Cell, Paths, refuse_changes, write_facts
from labkit.experiment.design import Run
from labkit.experiment.errors import Interrupted, StudyError
from labkit.experiment.launcher import Launcher, ProcessLauncher, set_aside
from labkit.experiment.lock import timing_lock
from labkit.experiment.progress import Progress, Silent
from labkit.experiment.record import Record, RecordError, read, write
from labkit.experiment.signals import Signals

__all__ = [
    "Cell",
    "CellOutcome",
    "Interrupted",
    "Launcher",
    "ProcessLauncher",
    "StudyError",
    "refuse_changes",
    "run_cell",
    "unfinished",
]


@dataclass(frozen=True)
class CellOutcome:
    """What ``run_cell`` did: runs done now, runs found done, names of failed runs."""

    ran: int
    found: int
    failed: tuple[str, ...]
    seconds: float


def run_cell(
    cell: Cell,
    launcher: Launcher | None = None,
    progress: Progress | None = None,
    *,
    redo_failed: bool = False,
) -> CellOutcome:
    """Run what is missing of a cell.

    Parameters
    ----------
    launcher
        Who carries out a run; by default one fresh process per run.
    redo_failed
        Run blocks with a failed run again; their records are kept in ``runs/abandoned``.

    Raises
    ------
    ConfigError
        The folder holds another question's records.
    StudyError
        The disk is full, the folder can't be written, ...: what was recorded stays.
    Interrupted
        SIGINT or SIGTERM; the same command continues.
    """
    launcher = ProcessLauncher() if launcher is None else launcher
    progress = Silent() if progress is None else progress
    start = time.monotonic()
    with (
        _one_line(cell),
        Signals() as signals,
        timing_lock(str(cell.dir), on_wait=progress.note, check=signals.check),
    ):
        refuse_changes(cell)
        write_facts(cell)
        paths = Paths(cell.dir)
        todo = _tidy(cell, paths, progress, redo_failed)
        total = len(cell.schedule())
        progress.begin(cell, total, total - len(todo))
        try:
            if todo:
                launcher.prepare(cell, paths, signals, progress)
            for run in todo:
                signals.check()
                progress.run_started(run)
                record = launcher.launch(run, cell, paths, signals, progress)
                write(paths.record(run), record)
                progress.run_ended(record)
        finally:
            progress.end()
        records = [read(paths.record(run)) for run in cell.schedule()]
    failed = tuple(record.run for record in records if not record.ok)
    return CellOutcome(len(todo), total - len(todo), failed, time.monotonic() - start)


def unfinished(cell: Cell, *, redo_failed: bool = False) -> list[Run]:
    """Give the runs that ``run_cell`` would do, without changing anything."""
    paths = Paths(cell.dir)
    return [run for block in _blocks(cell) if _why(block, paths, redo_failed) for run in block]


def _blocks(cell: Cell) -> list[list[Run]]:
    return [list(runs) for _, runs in groupby(cell.schedule(), key=lambda run: run.block)]


def _why(block: Sequence[Run], paths: Paths, redo_failed: bool) -> str | None:
    """Say why a block is to be run (again), or None when it is done."""
    records: list[Record] = []
    for run in block:
        path = paths.record(run)
        if not path.exists():
            return "unfinished"
        try:
            records.append(read(path))
        except RecordError as error:
            return str(error)
    if redo_failed and not all(record.ok for record in records):
        return "failed"
    return None


def _tidy(cell: Cell, paths: Paths, progress: Progress, redo_failed: bool) -> list[Run]:
    """Set aside what unfinished blocks and dead workers left; give the runs to do."""
    for path in sorted(paths.pending.iterdir()):
        set_aside(path, paths)
    for path in paths.runs.glob(".*.tmp"):  # half-written by a killed process, never a record
        set_aside(path, paths)
    todo: list[Run] = []
    for block in _blocks(cell):
        why = _why(block, paths, redo_failed)
        if why is None:
            continue
        todo += block
        files = [p for run in block for p in (paths.record(run), paths.log(run)) if p.exists()]
        for path in files:
            set_aside(path, paths)
        if files:
            moved = f"{len(files)} files moved to {paths.abandoned}"
            progress.note(f"block {block[0].block + 1} is run again ({why}; {moved})")
    return todo


@contextmanager
def _one_line(cell: Cell) -> Iterator[None]:
    """Turn what the disk says into one line."""
    try:
        yield
    except OSError as error:
        where = error.filename or cell.dir
        reason = error.strerror or str(error)
        raise StudyError(
            f"{where}: {reason}; what was recorded is safe, and the same command continues"
        ) from error
