"""Choose the requests or windows per run and a cell's blocks, from a pilot and ``design.time``.

A pilot block, which is not analysed, serves the first requests. It measures what a block costs
besides its requests, what a request costs in all arms, and how much the latency of the same request
varies between the baseline and its copy (between all arms if there is no control). Requests in
flight together are slowed together: they count as one. As for kernels
(:mod:`labkit.experiment.schedule.case_time_allocation`), the numbers follow from these only, never
from means. A run serves all requests if enough such blocks fit, else the first of them: of the
numbers of blocks that fit, the one with which a row is most likely decided. The windows of a
scoring workload follow from declared looks at the limits on quality
(:func:`labkit.analysis.statistics.text_window_intervals.window_looks`), its blocks from the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit import workload
from labkit.config import Design, count_text
from labkit.experiment.cell import UNITS, ReadyCell
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import format_duration
from labkit.experiment.schedule import case_time_allocation
from labkit.experiment.schedule.case_time_allocation import Allocation, CaseShare, CellPilot
from labkit.experiment.worker.worker_setup import experiment_of
from labkit.records import Record
from labkit.workload.kernels.interleaved_kernels import round_sd
from labkit.workload.workload_protocols import CasePilot

PILOT_BLOCK = 999  # a block that no design has, so that its order and files are its own
MIN_UNITS = 8
MIN_WAVES = 2  # requests per client of a closed loop: the last ones end alone
PACED_TOGETHER = 16  # requests that count as one where they arrive by themselves
MOST_BLOCKS = 100


@dataclass(frozen=True)
class UnitLimits:
    """The numbers of requests or windows (``noun``) that a run may have."""

    noun: str
    together: int  # those that are in flight together
    least: int
    total: int

    @classmethod
    def of(cls, cell: ReadyCell) -> UnitLimits:
        """Return the limits of a cell, which are those of its baseline."""
        experiment = experiment_of(cell.arms[0])
        total = workload.units(experiment)
        together = min(total, experiment.workload.concurrency or PACED_TOGETHER)
        least = min(total, max(MIN_UNITS, MIN_WAVES * together))
        return cls("request" if experiment.workload.serves else "window", together, least, total)

    @property
    def in_pilot(self) -> int:
        return min(self.total, max(MIN_UNITS, self.together))

    def fixed(self, count: int) -> UnitLimits:
        return replace(self, least=count, total=count)


def pilot_runs(cell: ReadyCell, count: int) -> tuple[ReadyCell, list[Run]]:
    """Return the cell whose arms serve the pilot's requests, and the runs of its block."""
    first = (run for run in cell.schedule() if run.block == 0)
    return cell.with_rounds({UNITS: count}), [replace(run, block=PILOT_BLOCK) for run in first]


def pilot_of(records: Sequence[Record], count: int, together: int) -> CellPilot | None:
    """Return what the records of a pilot block say, or None if its baseline failed.

    ``count``: the requests or windows of each of its runs.
    """
    times = {record.arm: _times(record) for record in records if record.ok}
    roles = {record.role: record.arm for record in records}
    base = times.pop(roles.get("baseline", ""), None)
    if not base:
        return None
    copy = roles.get("control", "")
    others = [times[copy]] if copy in times else list(times.values())
    logs = [
        np.array([math.log(arm[name]) for name in base])
        for arm in (base, *others)
        if arm.keys() >= base.keys()
    ]
    # Windows are timed in rounds of as many as requests are in flight together.
    sd = round_sd(logs) * math.sqrt(together)
    spent_s = sum(record.seconds.get("process", 0.0) for record in records)
    start_s = sum(record.start_up_s or 0.0 for record in records)
    unit_s = max(0.0, spent_s - start_s) / count
    return CellPilot(start_s, (CasePilot(UNITS, unit_s, 0.0, sd, count),))


def _times(record: Record) -> Mapping[str, float]:
    """Return each served request's latency, or the time of each round of scored windows."""
    notes = (note for case in record.cases for note in case.known_notes.get("requests", ()))
    if latencies := {note["id"]: note["e2e_ms"] for note in notes if note["e2e_ms"] > 0}:
        return latencies
    primary = (m for case in record.cases for m in case.metrics if m.primary)
    return {str(i): v for m in primary for i, v in enumerate(m.repeats) if v > 0}


def allocate_units(
    pilot: CellPilot,
    design: Design,
    arms: int,
    time_s: float,
    limits: UnitLimits,
    blocks: int | None = None,
) -> Allocation:
    """Return the blocks, and the requests of each run, that fit into ``time_s`` seconds.

    ``arms``: how many are tested together. ``blocks``: their number, if it is fixed.
    """
    (case,) = pilot.cases

    def option(count: int, requests: int) -> Allocation:
        p = case_time_allocation.p_decided(design, arms, count, case.sd, requests)
        seconds = count * (pilot.start_s + requests * case.round_s)
        return Allocation(count, (CaseShare(UNITS, count, requests, p, 0.0),), seconds)

    def fitting(count: int) -> Allocation:
        room = (time_s / count - pilot.start_s) / max(case.round_s, 1e-9)
        return option(count, min(limits.total, max(limits.least, int(room))))

    fewest = fewest_blocks(design, arms)
    full = int(time_s / max(option(1, limits.total).seconds, 1e-3))
    if blocks is None and full >= max(fewest, case_time_allocation.USUAL_BLOCKS):
        return option(min(MOST_BLOCKS, full), limits.total)
    most = max(fewest, case_time_allocation.MAX_BLOCKS)
    counts = [blocks] if blocks is not None else range(fewest, most + 1)
    return case_time_allocation.best_allocation([fitting(count) for count in counts], time_s)


def unit_lines(
    allocation: Allocation, limits: UnitLimits, time_s: float | None, forecasts: bool
) -> Iterator[str]:
    """Yield what a run serves, how many blocks there are and how long they take.

    ``forecasts``: whether it is known how likely a row is decided.
    """
    (share,) = allocation.cases
    part = "all" if share.rounds >= limits.total else f"{share.rounds} of"
    units = f"{part} {count_text(limits.total, limits.noun)}"
    chance = f"; decided with {share.p_decided:.0%} if the arms do not differ"
    yield (
        f"{count_text(allocation.blocks, 'block')} with {units} per run, about "
        f"{format_duration(allocation.seconds)}{chance if forecasts and share.p_decided else ''}"
    )
    if time_s is not None and allocation.seconds > 1.05 * time_s:
        yield (
            f"this is longer than design.time, which leaves {format_duration(max(0.0, time_s))}: "
            f"with fewer blocks or {limits.noun}s nothing could be claimed"
        )
