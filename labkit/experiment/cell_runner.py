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

from labkit.config import Isolation
from labkit.experiment import StudyError, differing_outputs
from labkit.experiment.cell import Cell
from labkit.experiment.cell_manifest import (
    AllDecided,
    ended_at_look,
    exploratory_warning,
    refuse_changes,
    take_interim_look,
    write_manifest,
)
from labkit.experiment.file_locks import cell_lock, timing_lock
from labkit.experiment.interrupt_signals import InterruptSignals
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import Progress
from labkit.experiment.run_launcher import ProcessLauncher, RunLauncher
from labkit.machine import fingerprint
from labkit.machine.cache_dir import CacheError
from labkit.records import Record, RecordError, read_record, write_record


@dataclass(frozen=True)
class CellOutcome:
    """What ``run_cell`` did: runs done now, runs found done, names of failed runs."""

    ran: int
    found: int
    failed: tuple[str, ...]
    seconds: float


def run_cell(
    cell: Cell,
    launcher: RunLauncher | None = None,
    progress: Progress | None = None,
    *,
    redo_failed: bool = False,
    decided: AllDecided | None = None,
) -> CellOutcome:
    """Run what is missing of a cell.

    Parameters
    ----------
    launcher
        Who carries out a run; by default one fresh process per run.
    redo_failed
        Run blocks with a failed run again; their records are kept in ``runs/abandoned``.
    decided
        Takes the looks: tells from the cell's folder whether all is decided. Needed where
        the design has looks.

    Raises
    ------
    ConfigError
        The folder holds another question's records.
    StudyError
        The disk is full, the folder can't be written, ...: what was recorded stays.
    Interrupted
        SIGINT or SIGTERM; the same command continues.
    """
    progress = Progress() if progress is None else progress
    launcher = ProcessLauncher(progress=progress) if launcher is None else launcher
    start = time.monotonic()
    with (
        _one_line(cell),
        InterruptSignals() as signals,
        cell_lock(cell.dir, on_wait=progress.note, check=signals.check),
        timing_lock(str(cell.dir), on_wait=progress.note, check=signals.check),
    ):
        refuse_changes(cell)
        more = exploratory_warning(cell)
        if more is not None:
            progress.note(more)
        write_manifest(cell, cell.stopping_points[0])
        todo, records = _tidy(cell, progress, redo_failed)
        if todo:
            _refuse_host(cell, records)
        found = len(records)
        differing_outputs.settle(cell.dir, records)
        last_kept = [r.name for r in cell.schedule() if r.block == differing_outputs.BLOCK][-1]
        progress.begin(cell, len(todo) + found, found)
        try:
            for stop in cell.stopping_points:
                write_manifest(cell, stop)
                here = [run for run in todo if run.block < stop]
                todo = todo[len(here) :]
                for record in _carry_out(here, cell, launcher, progress, signals):
                    records.append(record)
                    if record.run == last_kept:
                        differing_outputs.settle(cell.dir, records)
                if take_interim_look(cell, stop, records, decided):
                    progress.note(f"all is decided at the look after {stop} blocks")
                    break
        finally:
            progress.end()
    failed = tuple(record.run for record in records if not record.ok)
    return CellOutcome(len(records) - found, found, failed, time.monotonic() - start)


def _refuse_host(cell: Cell, records: Sequence[Record]) -> None:
    """Refuse to go on elsewhere with a cell whose runs are compared on one host."""
    here = fingerprint.host_hash()
    theirs = {str(record.environment.get("host", here)) for record in records} - {here}
    if theirs and not cell.design.across_hosts:
        raise StudyError(
            f"its runs are of host {', '.join(sorted(theirs))}, and this is host {here}: "
            "go on there, or set design.across_hosts=true (each block stays on one host)"
        )


def _carry_out(
    runs: Sequence[Run],
    cell: Cell,
    launcher: RunLauncher,
    progress: Progress,
    signals: InterruptSignals,
) -> Iterator[Record]:
    """Do ``runs`` in order, publish each record and yield it."""
    if runs:
        launcher.prepare(cell)
    for batch in _batches(runs, cell.design.isolation):
        signals.check()
        progress.started(batch)
        for record in launcher.launch(batch, cell):
            write_record(cell.paths.runs / f"{record.run}.json", record)
            yield record
            compiled = record.notes.get("compiles", {}).get("measure", 0)
            if compiled:
                progress.note(f"{record.run}: {compiled} kernels were compiled while measuring")
            progress.run_ended(record)


def _batches(runs: Sequence[Run], isolation: Isolation) -> list[list[Run]]:
    """Group the runs that share a process."""
    if isolation is Isolation.process:
        return [[run] for run in runs]
    return [list(block) for _, block in groupby(runs, key=lambda run: run.block)]


def unfinished(cell: Cell, *, redo_failed: bool = False) -> list[Run]:
    """Return the runs that ``run_cell`` would do, without changing anything."""
    if ended_at_look(cell) and not redo_failed:
        return []
    blocks = [(block, _look(block, cell, redo_failed)) for block in _blocks(cell)]
    return [run for block, look in blocks if look.again for run in block]


def _blocks(cell: Cell) -> list[list[Run]]:
    return [list(runs) for _, runs in groupby(cell.schedule(), key=lambda run: run.block)]


@dataclass(frozen=True)
class _Look:
    """What a block's files say: its records, and why it is run (again); None: it is done."""

    records: list[Record]
    again: str | None


def _look(block: Sequence[Run], cell: Cell, redo_failed: bool) -> _Look:
    records: list[Record] = []
    for run in block:
        path = cell.paths.record(run)
        if not path.exists():
            return _Look(records, "unfinished")
        try:
            records.append(read_record(path))
        except RecordError as error:
            return _Look(records, str(error))
    failed = redo_failed and not all(record.ok for record in records)
    return _Look(records, "failed" if failed else None)


def _tidy(cell: Cell, progress: Progress, redo_failed: bool) -> tuple[list[Run], list[Record]]:
    """Set aside what unfinished blocks and dead workers left.

    Returns
    -------
    runs to do, records of the blocks that are done
    """
    paths = cell.paths
    for path in (*sorted(paths.pending.iterdir()), *paths.runs.glob(".*.tmp")):
        paths.move_to_abandoned(path)  # written by a killed process, never published
    todo: list[Run] = []
    done: list[Record] = []
    for block in _blocks(cell):
        look = _look(block, cell, redo_failed)
        if look.again is None:
            done += look.records
            continue
        todo += block
        files = [p for run in block for p in (paths.record(run), paths.log(run)) if p.exists()]
        for path in files:
            paths.move_to_abandoned(path)
        if files:
            moved = f"{len(files)} files moved to {paths.abandoned}"
            progress.note(f"block {block[0].block + 1} is run again ({look.again}; {moved})")
    return todo, done


@contextmanager
def _one_line(cell: Cell) -> Iterator[None]:
    """Turn what the disk says into one line."""
    try:
        yield
    except CacheError as error:
        raise StudyError(str(error)) from error
    except OSError as error:
        where = error.filename or cell.dir
        reason = error.strerror or str(error)
        raise StudyError(
            f"{where}: {reason}; what was recorded is safe, and the same command continues"
        ) from error
