"""Allocation of a cell: its blocks, looks and rounds, where they follow from ``design.time``.

A kernel workload with ``workload.repeats=null`` begins with a pilot, whose costs and noise give the
number of blocks and each case's first rounds
(:mod:`labkit.experiment.schedule.case_time_allocation`); :class:`.rounds_per_block.RoundPlanner`
plans the rounds of the blocks to come. One of requests with ``workload.num_requests=0`` begins with
a pilot block, which gives every run its requests (and one of scored windows with
``workload.num_windows=0``, which is judged at declared looks)
(:mod:`labkit.experiment.schedule.requests_per_run`). The runs of any other workload have a fixed
size: the first block is timed, and as many blocks follow as fit. The allocation is written to the
cell's folder before any result is known. It changes only if blocks take much longer than planned:
then the last look comes earlier (:mod:`labkit.experiment.schedule.cell_time_limit`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from labkit.analysis.statistics.text_window_intervals import window_looks
from labkit.config import ConfigError, Isolation, PlannedLook, count_text, to_plain
from labkit.experiment.cell import ALLOCATION, UNITS, BlockPlan, ReadyCell
from labkit.experiment.compose.reachable_interim_looks import planned_looks
from labkit.experiment.launch.run_launcher import RunLauncher
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import Progress, format_duration
from labkit.experiment.schedule import (
    case_time_allocation,
    cell_manifest,
    design_change_check,
    requests_per_run,
)
from labkit.experiment.schedule.case_time_allocation import (
    MIN_ROUNDS,
    Allocation,
    CaseShare,
    CellPilot,
)
from labkit.experiment.schedule.requests_per_run import UnitLimits
from labkit.experiment.schedule.rounds_per_block import RoundPlanner
from labkit.records import Record, StudyPath, write_json

PILOT_SHARE, MIN_PILOT_S, MAX_PILOT_S = 0.08, 1.0, 8.0  # of the cell's time
MAX_BLOCKS = 100


@dataclass(frozen=True)
class CellAllocator:
    """Reads the allocation of a cell from its folder, or makes it."""

    launcher: RunLauncher
    progress: Progress
    run_first_block: Callable[[ReadyCell], Sequence[Record]]  # unless it is finished
    run_pilot_block: Callable[[ReadyCell, Sequence[Run]], Sequence[Record]]  # which does not count
    timing_lock: Callable[[], AbstractContextManager[None]]  # the host's
    analysis: cell_manifest.LookAnalysis | None = None  # judges the quality of scored texts

    def allocated(self, cell: ReadyCell) -> ReadyCell:
        """Return the cell with its blocks, looks and rounds.

        Raises ``ConfigError`` if the folder holds another cell.
        """
        path = cell.dir / ALLOCATION
        if not cell.follows_time or (not path.exists() and (cell.dir / "cell.json").exists()):
            return cell  # an earlier version began it, with numbers of its own
        if not path.exists():
            design_change_check.refuse_changes(cell)
            cell_manifest.write_arms(cell)
            with self.timing_lock():
                if cell.counts_units:
                    data = self._units_piloted(cell)
                else:
                    data = self._piloted(cell) if cell.rounds_from_time else self._timed(cell)
            write_json(path, data)
        return with_allocation(cell)

    def _piloted(self, cell: ReadyCell) -> dict[str, Any]:
        """Run the pilot, and return the contents of the allocation's file."""
        design, pilot_cell = cell.design, prepare_arms(cell, self.launcher)
        start, wanted_s = time.monotonic(), PILOT_SHARE * (design.time or float("inf"))
        pilot_s = min(MAX_PILOT_S, max(MIN_PILOT_S, wanted_s))
        plain = self.launcher.pilot(pilot_cell, pilot_s)
        if plain is None:
            self.progress.note("the pilot failed, so every case gets the fewest rounds")
            shares = (CaseShare(case, design.blocks, MIN_ROUNDS, 0.0, 0.0) for case in cell.cases)
            return _contents(cell, Allocation(design.blocks, tuple(shares), 0.0), None)
        pilot = _of_all_arms(CellPilot.from_json(plain), cell)
        spent_s = time.monotonic() - start - plain.get("suspended_s", 0.0)
        left_s = None if design.time is None else design.time - spent_s
        allocation = allocation_of(cell, pilot, left_s)
        for line in lines_of(cell, allocation, left_s):
            self.progress.note(line)
        return _contents(cell, allocation, pilot, left_s)

    def _units_piloted(self, cell: ReadyCell) -> dict[str, Any]:
        prepare_arms(cell, self.launcher)
        start, limits = time.monotonic(), UnitLimits.of(cell)
        self.progress.note(f"pilot: what {limits.noun}s cost here, and how much they vary")
        if cell.window_looks:
            pilot, limits, records = self._windows_looked_at(cell, limits)
        else:
            pilot, records = self._pilot_block(cell, limits.in_pilot, limits)
        spent_s = time.monotonic() - start - sum(record.suspended_s for record in records)
        left_s = (cell.design.time or 0.0) - spent_s
        if pilot is None:
            self.progress.note(f"the pilot failed, so every run has {limits.least} {limits.noun}s")
            share = CaseShare(UNITS, cell.design.blocks, limits.least, 0.0, 0.0)
            return _contents(cell, Allocation(cell.design.blocks, (share,), 0.0), None)
        allocation = allocation_of(cell, pilot, left_s, limits)
        for line in lines_of(cell, allocation, left_s, limits):
            self.progress.note(line)
        return _contents(cell, allocation, pilot)

    def _pilot_block(
        self, cell: ReadyCell, count: int, limits: UnitLimits
    ) -> tuple[CellPilot | None, Sequence[Record]]:
        records = self.run_pilot_block(*requests_per_run.pilot_runs(cell, count))
        return requests_per_run.pilot_of(records, count, limits.together), records

    def _windows_looked_at(
        self, cell: ReadyCell, limits: UnitLimits
    ) -> tuple[CellPilot | None, UnitLimits, Sequence[Record]]:
        """Score windows until a declared look decides the limits on quality: so many a run has.

        Returns the records of all looks, too.
        """
        assert self.analysis is not None, "cells with looks are run with an analysis"
        looks, names = window_looks(limits.total), [arm.name for arm in cell.arms]
        pilot: CellPilot | None = None
        all_records = list[Record]()
        for count in looks[:-1] or looks:
            pilot, records = self._pilot_block(cell, count, limits)
            all_records += records
            decided = self.analysis.limits_decided(names, records, cell.arms[0].quality)
            if decided and count < limits.total:
                self.progress.note(f"the limits on quality are decided after {count} windows")
                return pilot, limits.fixed(count), all_records
        return pilot, limits.fixed(limits.total), all_records

    def _timed(self, cell: ReadyCell) -> dict[str, Any]:
        prepare_arms(cell, self.launcher)
        records = self.run_first_block(cell)
        blocks = cell.design.blocks
        if not all(cell.arm(record.arm).accepts(record) for record in records):
            # It says nothing about the time of the blocks to come.
            failed = "a run of the first block failed, so the cell gets the fewest blocks"
            self.progress.note(f"{failed}, {blocks}")
            return _contents(cell, Allocation(blocks, (), 0.0), None)
        block_s = sum(record.seconds.get("process", 0.0) for record in records)
        allocation, time_s = blocks_within(cell, block_s), cell.design.time or 0.0
        line = f"a block takes {block_s:.2g} s; {count_text(allocation.blocks, 'block')}"
        if allocation.seconds > 1.05 * time_s:
            line += (
                f" take about {format_duration(allocation.seconds)}, longer than design.time="
                f"{format_duration(time_s)}, because fewer could claim nothing"
            )
        self.progress.note(line)
        return _contents(cell, allocation, None)


def prepare_arms(cell: ReadyCell, launcher: RunLauncher) -> ReadyCell:
    """Prepare a cell's arms, whatever their numbers will be, and return the cell so prepared."""
    fixed = cell.with_fixed_numbers
    cell_manifest.write_arms(fixed)
    launcher.prepare(fixed)
    return fixed


def allocation_of(
    cell: ReadyCell, pilot: CellPilot, time_s: float | None, limits: UnitLimits | None = None
) -> Allocation:
    """Return the allocation of a cell for a time, given its pilot.

    ``limits``: those of the units of a run, by default the workload's.
    """
    blocks = None if cell.blocks_from_time else cell.design.blocks
    design, arms = cell.design, cell.tested_arms
    if cell.counts_units and time_s is not None:
        limits = limits or UnitLimits.of(cell)
        return requests_per_run.allocate_units(pilot, design, arms, time_s, limits, blocks)
    return case_time_allocation.allocate(pilot.pooled, design, arms, len(cell.arms), time_s, blocks)


def blocks_within(cell: ReadyCell, block_s: float) -> Allocation:
    """Return as many blocks of ``block_s`` seconds as fit into the cell's time, but enough."""
    fitting = int((cell.design.time or 0.0) / max(block_s, 1e-3))
    blocks = max(cell.design.blocks, min(MAX_BLOCKS, fitting))
    return Allocation(blocks, (), blocks * block_s)


def earlier_pilot(cell_dir: StudyPath) -> CellPilot | None:
    """Return the pilot of the cell in a folder, or None if it had none."""
    try:
        pilot = json.loads((cell_dir / ALLOCATION).read_bytes())["pilot"]
        return None if pilot is None else CellPilot.from_json(pilot)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def earlier_limits(cell: ReadyCell, cell_dir: StudyPath) -> UnitLimits | None:
    """Return the windows that looks found in an earlier cell with a pilot; None: no looks do."""
    if not cell.window_looks:
        return None
    (share,) = json.loads((cell_dir / ALLOCATION).read_bytes())["cases"]
    return UnitLimits.of(cell).fixed(share["rounds"])


def with_allocation(cell: ReadyCell) -> ReadyCell:
    """Return a cell with the allocation in its folder; the cell itself if there is none.

    Raises ``ConfigError`` if the file was made for another ``design.time``, or is damaged.
    """
    path = cell.dir / ALLOCATION
    if not cell.follows_time or not path.exists():
        return cell
    try:
        data = json.loads(path.read_text("utf-8"))
        shares = [CaseShare(**share) for share in data["cases"]]
        looks = [PlannedLook(**look) for look in data["looks"]]
        blocks, time_s = int(data["blocks"]), data["time_s"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not an allocation ({error}); set another folder") from None
    if time_s != cell.design.time:
        raise ConfigError(
            f"{cell.dir}: design.time was {time_s}, now {cell.design.time}; set another folder, "
            "out=NAME"
        )
    design = cell.design
    if cell.blocks_from_time:
        design = replace(design, blocks=blocks, looks=looks)
    starts = {0, *(share.blocks for share in shares if share.blocks < blocks)} if shares else ()
    piloted = data["pilot"] is not None and not cell.counts_units  # requests are not scaled
    pilot = CellPilot.from_json(data["pilot"]) if piloted else None
    plans = {start: _block_plan(shares, pilot, start) for start in sorted(starts)}
    out_of_reach = {share.case: share.needed_s for share in shares if share.blocks < blocks}
    estimates = cell_manifest.estimates_in_manifest(cell) or out_of_reach
    return replace(
        cell,
        design=design,
        plans=plans,
        timed=True,
        said_s=float(data["seconds"]) if cell.blocks_from_time else 0.0,
        estimates=estimates,
        blocks_from_time=False,
    )


def allocated_block_s(cell: ReadyCell) -> float:
    """Return the seconds that a cell's allocation gives a block; 0 if its pilot failed."""
    data = json.loads((cell.dir / ALLOCATION).read_text("utf-8"))
    return float(data["seconds"]) / int(data["blocks"])


def planner_of(cell: ReadyCell, records: Sequence[Record], blocks: int) -> RoundPlanner | None:
    """Return the time of the ``blocks`` that are left; None if their sizes are fixed.

    ``records``: those of the finished blocks.
    """
    pilot = earlier_pilot(cell.dir)
    if pilot is None or not cell.plans or cell.counts_units:
        return None
    deadline = time.monotonic() + allocated_block_s(cell) * blocks
    planner = RoundPlanner(cell, pilot, deadline, cell.estimates)
    planner.add_finished(records)
    return planner


def _block_plan(shares: Sequence[CaseShare], pilot: CellPilot | None, block: int) -> BlockPlan:
    rounds = {share.case: share.rounds for share in shares if block < share.blocks}
    if pilot is None:
        return BlockPlan(rounds)
    round_s = {case.case: case.round_s for case in pilot.cases}
    warm_up_s = {case.case: case.warm_up_s for case in pilot.cases}
    return BlockPlan(rounds, pilot.start_s, round_s, warm_up_s)


def _contents(
    cell: ReadyCell, allocation: Allocation, pilot: CellPilot | None, left_s: float | None = None
) -> dict[str, Any]:
    looks = looks_of(cell, allocation.blocks) if cell.blocks_from_time else cell.design.looks
    return {
        "time_s": cell.design.time,
        "blocks": allocation.blocks,
        "looks": [to_plain(look) for look in looks],
        "seconds": max(allocation.seconds, left_s or 0.0),
        "cases": [asdict(share) for share in allocation.cases],
        "pilot": None if pilot is None else asdict(pilot),
    }


def looks_of(cell: ReadyCell, blocks: int) -> list[PlannedLook]:
    """Return the looks of a cell whose blocks follow from its time."""
    return planned_looks(cell.design, cell.tested_arms, blocks) if cell.ends_early else []


def _of_all_arms(pilot: CellPilot, cell: ReadyCell) -> CellPilot:
    """Return the costs of a block, given those of its pilot process."""
    if cell.design.isolation is Isolation.in_process:
        return pilot
    arms = len(cell.arms) * cell.design.runs_per_block  # the pilot's process had one of them
    return pilot.for_share(arms, starts=arms)


def lines_of(
    cell: ReadyCell,
    allocation: Allocation,
    time_s: float | None,
    limits: UnitLimits | None = None,
) -> Iterator[str]:
    """Return lines on what will be measured and decided, and how long it takes.

    ``limits``: those of the units of a run, by default the workload's.
    """
    # Equivalence is forecast: a baseline alone and a sweep do not ask about it, and separate
    # processes vary by more than a pilot sees, each machine's by another amount.
    compares = not cell.sweep and any(arm.role == "arm" for arm in cell.arms)
    forecasts = compares and cell.design.isolation is not Isolation.process
    if cell.counts_units:
        limits = limits or UnitLimits.of(cell)
        return requests_per_run.unit_lines(allocation, limits, time_s, forecasts)
    return _allocation_lines(allocation, time_s, forecasts)


def _allocation_lines(
    allocation: Allocation, time_s: float | None, forecasts: bool
) -> Iterator[str]:
    """Yield what will be decided, and which cases are out of reach, one line each."""
    cases, blocks = allocation.cases, allocation.blocks
    likely = [share for share in cases if share.p_decided >= case_time_allocation.LIKELY]
    decided = (
        f": {len(likely)} of {count_text(len(cases), 'row')} are expected to be decided if the "
        f"arms do not differ ({case_time_allocation.LIKELY:.0%} or more each)"
    )
    yield (
        f"{count_text(blocks, 'process') if blocks == 1 else f'{blocks} processes'}, about "
        f"{format_duration(allocation.seconds)}{decided if forecasts else ''}"
    )
    out_of_reach = [
        f"{share.case} (would take {format_duration(share.needed_s)})"
        for share in cases
        if share.blocks < blocks
    ]
    if out_of_reach:
        yield f"estimates only: {'; '.join(out_of_reach)}"
    if time_s is not None and allocation.seconds > 1.05 * time_s:
        yield (
            f"this is longer than design.time, which leaves {format_duration(max(0.0, time_s))}: "
            "with fewer processes or rounds nothing could be claimed"
        )
