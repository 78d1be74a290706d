"""Requests of a run, and blocks of a cell, where they follow from ``design.time``.

A pilot block, which is not analysed, serves the first requests. It measures what a block costs
besides its requests, what a request costs in all arms, and how much the latency of the same request
varies between the baseline and its copy (between all arms if there is no control). Requests in
flight together are slowed together: they count as one. As for kernels
(:mod:`labkit.experiment.schedule.time_allocation`), the numbers follow from these only, never from
means. A run serves all requests if enough such blocks fit, else the first of them: of the numbers
of blocks that fit, the one with which a row is most likely decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.config import Design, count_text
from labkit.experiment.cell import REQUESTS, ReadyCell
from labkit.experiment.compose.reachable_looks import fewest_blocks
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import format_duration
from labkit.experiment.schedule.time_allocation import (
    MAX_BLOCKS,
    USUAL_BLOCKS,
    Allocation,
    CaseShare,
    CellPilot,
    p_decided,
)
from labkit.experiment.worker.worker_stages import experiment_of
from labkit.records import Record
from labkit.workload.kernels.kernel_pilot import round_sd
from labkit.workload.measurement import CasePilot
from labkit.workload.sources import source_of

PILOT_BLOCK = 999  # a block that no design has, so that its order and files are its own
MIN_REQUESTS = 8
MIN_WAVES = 2  # requests per client of a closed loop: the last ones end alone
PACED_TOGETHER = 16  # requests that count as one where they arrive by themselves
MOST_BLOCKS = 100


@dataclass(frozen=True)
class RequestLimits:
    """The numbers of requests that a run may serve.

    ``together``: the requests that are in flight together. ``least``, ``total``: the fewest of a
    run, and all of the workload.
    """

    together: int
    total: int

    @classmethod
    def of(cls, cell: ReadyCell) -> RequestLimits:
        """Return the limits of a cell, which are those of its baseline."""
        experiment = experiment_of(cell.arms[0])
        total = len(source_of(experiment).lengths(experiment))
        return cls(min(total, experiment.workload.concurrency or PACED_TOGETHER), total)

    @property
    def least(self) -> int:
        return min(self.total, max(MIN_REQUESTS, MIN_WAVES * self.together))

    @property
    def in_pilot(self) -> int:
        return min(self.total, max(MIN_REQUESTS, self.together))


def pilot_runs(cell: ReadyCell) -> tuple[ReadyCell, list[Run]]:
    """Return the cell whose arms serve the pilot's requests, and the runs of its block."""
    count = RequestLimits.of(cell).in_pilot
    first = (run for run in cell.schedule() if run.block == 0)
    runs = [replace(run, block=PILOT_BLOCK) for run in first]
    return cell.with_rounds({REQUESTS: count}), runs


def pilot_of(cell: ReadyCell, records: Sequence[Record]) -> CellPilot | None:
    """Return what the records of a pilot block say, or None if its baseline failed."""
    latencies = {record.role: _latencies(record) for record in records if record.ok}
    base = latencies.get("baseline")
    if not base:
        return None
    limits = RequestLimits.of(cell)
    served = max(1, min(limits.in_pilot, len(base)))
    spent_s = sum(record.seconds.get("process", 0.0) for record in records)
    start_s = sum(record.start_up_s or 0.0 for record in records)
    arms = [latencies["control"]] if "control" in latencies else list(latencies.values())
    logs = [[math.log(arm[name]) for name in base if name in arm] for arm in (base, *arms)]
    same = [one for one in logs if len(one) == len(base)]
    sd = round_sd([np.array(one) for one in same]) * math.sqrt(limits.together)
    request_s = max(0.0, spent_s - start_s) / served
    return CellPilot(start_s, (CasePilot(REQUESTS, request_s, 0.0, sd, served),))


def _latencies(record: Record) -> Mapping[str, float]:
    """Return each served request's latency (ms)."""
    notes = (note for case in record.cases for note in case.known_notes.get("requests", ()))
    return {note["id"]: note["e2e_ms"] for note in notes if note["e2e_ms"] > 0}


def allocate_requests(
    pilot: CellPilot,
    design: Design,
    arms: int,
    time_s: float,
    limits: RequestLimits,
    blocks: int | None = None,
) -> Allocation:
    """Return the blocks, and the requests of each run, that fit into ``time_s`` seconds.

    Parameters
    ----------
    arms
        The number of arms that are tested together.
    blocks
        The number of blocks, if it is fixed.
    """
    (case,) = pilot.cases

    def option(count: int, requests: int) -> Allocation:
        p = p_decided(design, arms, count, case.sd, requests)
        seconds = count * (pilot.start_s + requests * case.round_s)
        return Allocation(count, (CaseShare(REQUESTS, count, requests, p, 0.0),), seconds)

    def fitting(count: int) -> Allocation:
        room = (time_s / count - pilot.start_s) / max(case.round_s, 1e-9)
        return option(count, min(limits.total, max(limits.least, int(room))))

    fewest = fewest_blocks(design, arms)
    full = int(time_s / max(option(1, limits.total).seconds, 1e-3))
    if blocks is None and full >= max(fewest, USUAL_BLOCKS):
        return option(min(MOST_BLOCKS, full), limits.total)
    counts = [blocks] if blocks is not None else range(fewest, max(fewest, MAX_BLOCKS) + 1)
    options = [fitting(count) for count in counts]
    affordable = [one for one in options if one.seconds <= time_s] or options[:1]
    return max(
        affordable,
        key=lambda one: (round(one.expected_decisions, 1), -abs(one.blocks - USUAL_BLOCKS)),
    )


def request_lines(allocation: Allocation, total: int, time_s: float | None) -> Iterator[str]:
    """Yield what a run serves, how many blocks there are and how long they take."""
    (share,) = allocation.cases
    part = "all" if share.rounds >= total else f"{share.rounds} of"
    chance = f"; decided with {share.p_decided:.0%} if the arms do not differ"
    yield (
        f"{count_text(allocation.blocks, 'block')} with {part} {count_text(total, 'request')} per "
        f"run, about {format_duration(allocation.seconds)}{chance if share.p_decided else ''}"
    )
    if time_s is not None and allocation.seconds > 1.05 * time_s:
        yield (
            f"this is longer than design.time, which leaves {format_duration(max(0.0, time_s))}: "
            "with fewer blocks or requests nothing could be claimed"
        )
