"""The runner of a cell: plan its blocks, then launch, check and record the runs of each.

    for block in blocks that are not finished:      # each a random permutation of the arms' runs
        for runs in processes of block:             # isolation=process: one run per process
            for record in launcher.launch(runs):    # a fresh process; a crash gives a record too
                write record to runs/
        if an interim look is due and every comparison is decided: break

A block is finished when all its records exist. The same command on the same folder runs what is
missing. The records of an unfinished block move to ``runs/abandoned`` and the whole block runs
again, because half a block is not a randomised comparison. Nothing is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from labkit.config import Isolation, count_text
from labkit.experiment import StudyError
from labkit.experiment.cell import BlockPlan, ReadyCell
from labkit.experiment.launch.failed_run_records import failed, run_failures
from labkit.experiment.launch.interrupt_signals import InterruptSignals
from labkit.experiment.launch.run_launcher import RunLauncher, WorkerLauncher
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import DecidedRow, Progress
from labkit.experiment.schedule import cell_manifest, design_change_check
from labkit.experiment.schedule.cell_folder_lock import cell_lock
from labkit.experiment.schedule.cell_time_limit import TimeLimit, ended_early
from labkit.experiment.schedule.pilot_and_allocation import CellAllocator, planner_of, prepare_arms
from labkit.experiment.schedule.rounds_per_block import RoundPlanner
from labkit.experiment.schedule.timing_lock import timing_lock
from labkit.experiment.worker import output_array_files
from labkit.experiment.worker.worker_setup import without_values
from labkit.machine.cache_entries import CacheError
from labkit.machine.facts import machine_snapshot
from labkit.records import Record, RecordError, publish_records, read_digests, read_record

Block = Sequence[Run]  # all runs of one block, in their order


@dataclass(frozen=True)
class CellOutcome:
    """The result of :func:`run_cell`."""

    ran: int  # the number of runs done by this call
    already_done: int  # the number of runs whose records existed before
    failed: tuple[str, ...]  # the names of failed runs
    seconds: float  # wall time of the call


def run_cell(
    cell: ReadyCell,
    launcher: RunLauncher | None = None,
    progress: Progress | None = None,
    *,
    redo_failed: bool = False,
    analysis: cell_manifest.LookAnalysis | None = None,
) -> CellOutcome:
    """Run the missing runs of a cell, while holding the cell's lock.

    The host's timing lock is held from the first missing run on, so a finished cell never waits
    for another study. ``redo_failed``: repeat the blocks with a failed run, whose old records move
    to ``runs/abandoned``. A run that runs out of memory as its arm claims has not failed.
    ``analysis`` judges the cell at an interim look, and is needed if the design has looks.

    Raises ``ConfigError`` if the folder holds records of other arms or another design;
    ``StudyError`` if the disk is full, the folder can't be written, ...: records already written
    stay; ``Interrupted`` after SIGINT or SIGTERM: the same command continues the cell.
    """
    progress = Progress() if progress is None else progress
    launcher = WorkerLauncher(progress=progress) if launcher is None else launcher
    start = time.monotonic()
    with (
        _disk_errors_as_one_line(cell),
        InterruptSignals() as signals,
        cell_lock(cell.dir, on_wait=progress.note, check=signals.check),
    ):
        first = _BlockRunner(cell, launcher, progress, signals)
        allocator = CellAllocator(
            launcher,
            progress,
            first.run_first_block,
            first.run_pilot_block,
            first.timing_lock,
            analysis,
        )
        cell = allocator.allocated(cell)
        blocks, old_records = _prepare_blocks(cell, progress, redo_failed)
        runner = _BlockRunner(cell, launcher, progress, signals, analysis)
        new_records = runner.run_blocks(blocks, old_records)
        signals.check()  # one may have come while records were read, or during the last look
    records = [*old_records, *new_records]
    failed = tuple(record.run for record in records if not record.ok)
    return CellOutcome(len(new_records), len(old_records), failed, time.monotonic() - start)


@dataclass(frozen=True)
class _BlockRunner:
    """Runs a cell's blocks while the cell's lock is held."""

    cell: ReadyCell
    launcher: RunLauncher
    progress: Progress
    signals: InterruptSignals
    analysis: cell_manifest.LookAnalysis | None = None

    def run_blocks(
        self,
        blocks: Sequence[Block],
        old_records: Sequence[Record],
    ) -> list[Record]:
        """Run the blocks until a look decides every comparison, and return the new records."""
        cell, records, holds_timing_lock = self.cell, list(old_records), False
        planner: RoundPlanner | None = None
        limit: TimeLimit | None = None
        with ExitStack() as held:
            self.progress.begin(cell, sum(map(len, blocks)) + len(records), len(records))
            held.callback(self.progress.end)
            for end in cell.stopping_points:
                due = [block for block in blocks if _index(block) < end]
                blocks = blocks[len(due) :]  # blocks are in order, so the due ones come first
                begins = bool(due) and not holds_timing_lock
                if begins and (refusal := _another_host(cell, records)):
                    raise StudyError(refusal)
                cell_manifest.write_manifest(cell, end)
                if begins:
                    held.enter_context(self.timing_lock())
                    holds_timing_lock = True
                if due:
                    prepare_arms(cell, self.launcher)
                    left = len(due) + len(blocks)
                    planner = planner or planner_of(cell, records, left)
                    limit = limit or TimeLimit.of(cell, left, records)
                for block in due:
                    if limit is not None and limit.ends_before(_index(block)):
                        self._end_early(_index(block), records)
                        return records[len(old_records) :]
                    ended = self._run_block(block, planner, records[len(old_records) :])
                    records += ended
                    if limit is not None:
                        limit.block_ended(sum(record.suspended_s for record in ended))
                    if _index(block) == output_array_files.BLOCK:
                        output_array_files.drop_equal(cell.dir, records)
                if cell_manifest.take_interim_look(cell, end, records, self.analysis):
                    self._note_decided(end)
                    break
                self._note_stopped(end)
                blocks = self._without_dropped_arms(blocks)
        return records[len(old_records) :]

    def _end_early(self, blocks: int, records: list[Record]) -> None:
        ended = ended_early(self.cell, blocks)
        self.progress.note(
            f"blocks take longer than planned: {blocks} instead of {self.cell.design.blocks}"
        )
        cell_manifest.take_interim_look(ended, blocks, records, self.analysis)

    def _note_decided(self, blocks: int) -> None:
        decided = "has one best setting" if self.cell.sweep else "is decided"
        estimated = cell_manifest.estimates_in_manifest(self.cell)
        rows = "row that was still measured" if estimated else "primary row"
        self.progress.note(
            f"every {rows} {decided} at the look after {count_text(blocks, 'block')}"
        )

    def _note_stopped(self, blocks: int) -> None:
        """Show the rows that the look has decided; they are not measured any longer."""
        cell, plan = self.cell, self.cell.plan(blocks)
        decided = cell_manifest.stopped_cases(cell, blocks)
        stopped = decided - cell_manifest.stopped_cases(cell, blocks - 1)
        if stopped and self.analysis is not None:
            waiting = [] if plan is None else [case for case in plan.rounds if case not in decided]
            rows = self.analysis.decided_rows(cell.dir, cell.rows_of(stopped))
            self.progress.rows_decided([DecidedRow(**row) for row in rows], waiting)

    def _without_dropped_arms(self, blocks: Sequence[Block]) -> Sequence[Block]:
        if not self.cell.design.eliminate:
            return blocks
        left = {_index(block) for block in blocks}
        return [block for block in _scheduled_blocks(self.cell) if _index(block) in left]

    def run_first_block(self, cell: ReadyCell) -> list[Record]:
        """Run the first block of a cell that has no manifest yet, unless it is finished."""
        block = _scheduled_blocks(cell)[0]
        status = _block_status(block, cell, redo_failed=False)
        if status.run_reason is None:
            return status.records
        _move_unpublished_files(cell)
        _abandon_block(block, cell, self.progress, status.run_reason)
        only = replace(cell, design=replace(cell.design, blocks=1))
        self.progress.begin(only, len(block), 0)
        try:
            return self._run_block(block)
        finally:
            self.progress.end()

    def run_pilot_block(self, cell: ReadyCell, runs: Block) -> list[Record]:
        cell_manifest.write_arms(cell)
        _move_unpublished_files(cell)
        records = list[Record]()
        for together in _runs_by_process(runs, cell.design.isolation):
            self.signals.check()
            records += self.launcher.launch(together, cell)
        return records

    def timing_lock(self) -> AbstractContextManager[None]:
        holder, note = str(self.cell.dir.absolute()), self.progress.note
        return timing_lock(holder, on_wait=note, check=self.signals.check)

    def _run_block(
        self, block: Block, planner: RoundPlanner | None = None, earlier: Sequence[Record] = ()
    ) -> list[Record]:
        """Launch the processes of a block one after the other, and write each record.

        ``earlier``: the records of the blocks before it that this command has run.
        """
        records: list[Record] = []
        design_change_check.refuse_changed_inputs(self.cell)
        cell, start = self.cell, time.monotonic()
        plan = self._plan(block, planner)
        cell = cell.with_fixed_numbers if plan is None else cell.with_plan(plan)
        cell_manifest.write_arms(cell)
        for runs in _runs_by_process(block, self.cell.design.isolation):
            self.signals.check()
            self.progress.started(runs)
            launched = self._launch(runs, cell, [*earlier, *records])
            ended = [without_values(record, self.cell.arms) for record in launched]
            for record in ended:
                publish_records(self.cell.dir, record)
                self._show(record)
            records += ended
            self.progress.launch_ended(ended)
        if plan is not None and planner is not None:
            suspended_s = sum(record.suspended_s for record in records)
            planner.ended(plan, records, time.monotonic() - start, suspended_s)
        return records

    def _launch(self, runs: Block, cell: ReadyCell, earlier: Sequence[Record]) -> list[Record]:
        """Launch runs, but for those of arms whose runs have all failed in the same way."""
        failures = run_failures(earlier, cell)
        hopeless = [run for run in runs if run.arm in failures]
        given_up = failed(hopeless, cell, failures) if hopeless else []
        for arm in {run.arm: None for run in hopeless}:
            if failures[arm].detail not in {record.detail for record in earlier}:
                self.progress.note(f"arm {arm} is {failures[arm].detail}")
        left = [run for run in runs if run not in hopeless]
        return [*given_up, *(self.launcher.launch(left, cell) if left else ())]

    def _plan(self, block: Block, planner: RoundPlanner | None) -> BlockPlan | None:
        """Return a block's plan, and write which cases are out of reach; None: fixed sizes."""
        index = _index(block)
        plan, stopped = self.cell.plan(index), cell_manifest.stopped_cases(self.cell, index)
        if planner is None:
            return None if plan is None else plan.without(stopped)
        planned = planner.plan(index, stopped, len({run.arm for run in block}))
        cell_manifest.write_estimates(self.cell, planner.estimates)
        return planned

    def _show(self, record: Record) -> None:
        if compiled := record.notes.get("compiles", {}).get("measure", 0):
            kernels = "1 kernel was" if compiled == 1 else f"{compiled} kernels were"
            self.progress.note(f"{record.run}: {kernels} compiled while measuring")
        self.progress.run_ended(record)


def _index(block: Block) -> int:
    return block[0].block


def _runs_by_process(block: Block, isolation: Isolation) -> list[Block]:
    """Return the runs that are launched together: each alone, or a block's if arms take turns."""
    return [[run] for run in block] if isolation is Isolation.process else [block]


def warnings_before(cell: ReadyCell) -> list[str]:
    """Return what :func:`run_cell` would say of a cell before it runs the missing blocks."""
    finished = list[Record]()
    for block in _scheduled_blocks(cell):
        status = _block_status(block, cell, redo_failed=False)
        finished += status.records if status.run_reason is None else []
    said = cell_manifest.exploratory_warning(cell), _another_host(cell, finished)
    return [line for line in said if line is not None]


def unfinished(cell: ReadyCell, *, redo_failed: bool = False) -> list[Run]:
    """Return the runs that :func:`run_cell` would do, without changing anything."""
    if cell_manifest.ended_at_look(cell) and not redo_failed:
        return []
    return [
        run
        for block in _scheduled_blocks(cell)
        if _block_status(block, cell, redo_failed).run_reason is not None
        for run in block
    ]


def _scheduled_blocks(cell: ReadyCell) -> list[Block]:
    runs = cell.schedule_after_looks(cell_manifest.kept_arms(cell))
    return [list(block) for _, block in groupby(runs, key=lambda run: run.block)]


@dataclass(frozen=True)
class _BlockStatus:
    records: list[Record]
    run_reason: str | None  # why the block must run (again); None if it is finished


def _block_status(block: Block, cell: ReadyCell, redo_failed: bool) -> _BlockStatus:
    records, digests = list[Record](), read_digests(cell.dir)
    for run in block:
        path = cell.paths.record(run)
        if not path.exists():
            return _BlockStatus(records, "unfinished")
        try:
            records.append(read_record(path, digests.get(f"runs/{path.name}")))
        except RecordError as error:
            return _BlockStatus(records, str(error))
    accepted = (cell.arm(run.arm).accepts(r) for run, r in zip(block, records, strict=True))
    redo = redo_failed and not all(accepted)
    return _BlockStatus(records, "failed" if redo else None)


def _prepare_blocks(
    cell: ReadyCell, progress: Progress, redo_failed: bool
) -> tuple[list[Block], list[Record]]:
    """Check the cell's folder, move leftovers aside, and write the manifest.

    Returns the blocks to run, and the records of the finished blocks. Raises ``StudyError``, and
    changes nothing, if the cell cannot be continued on this host.
    """
    design_change_check.refuse_changes(cell)
    blocks = _scheduled_blocks(cell)
    statuses = [_block_status(block, cell, redo_failed) for block in blocks]
    records = [record for s in statuses if s.run_reason is None for record in s.records]
    due = [(b, s.run_reason) for b, s in zip(blocks, statuses, strict=True) if s.run_reason]
    end = cell_manifest.ended_at_look(cell)  # later blocks do not run
    runs = any(end is None or _index(block) < end for block, _ in due)
    if runs and (refusal := _another_host(cell, records)):
        raise StudyError(refusal)
    if warning := cell_manifest.exploratory_warning(cell):
        progress.note(warning)
    cell_manifest.write_manifest(cell, cell.stopping_points[0])
    _move_unpublished_files(cell)
    for block, reason in due:
        _abandon_block(block, cell, progress, reason)
    output_array_files.drop_equal(cell.dir, records)
    return [block for block, _ in due], records


def _move_unpublished_files(cell: ReadyCell) -> None:
    """Move unchecked and half-written records of killed processes to ``runs/abandoned``."""
    paths = cell.paths
    for path in (*sorted(paths.pending.iterdir()), *paths.runs.glob(".*.tmp")):
        paths.move_to_abandoned(path)


def _abandon_block(block: Block, cell: ReadyCell, progress: Progress, reason: str) -> None:
    """Move the records and logs of a block that will run again to ``runs/abandoned``."""
    paths = cell.paths
    files = [p for run in block for p in (paths.record(run), paths.log(run)) if p.exists()]
    for path in files:
        paths.move_to_abandoned(path)
    if files:
        moved = f"{count_text(len(files), 'file')} moved to {paths.abandoned}"
        progress.note(f"block {_index(block) + 1} runs again ({reason}; {moved})")


def _another_host(cell: ReadyCell, records: Sequence[Record]) -> str | None:
    """Return why a cell with these records cannot be continued on this host, or None."""
    this_host = machine_snapshot.host_hash()
    hosts = {str(record.environment.get("host", this_host)) for record in records}
    others = sorted(hosts - {this_host})
    if not others or cell.design.across_hosts:
        return None
    return (
        f"the cell's runs are from host {', '.join(others)}, but this is host {this_host}; "
        "continue there (a container keeps its host name with --hostname), or set "
        "design.across_hosts=true (each block stays on one host)"
    )


@contextmanager
def _disk_errors_as_one_line(cell: ReadyCell) -> Iterator[None]:
    try:
        yield
    except CacheError as error:
        raise StudyError(str(error)) from error
    except OSError as error:
        where = error.filename or cell.dir
        reason = error.strerror or str(error)
        raise StudyError(
            f"{where}: {reason}; finished blocks stay; run the same command again to continue"
        ) from error
