"""The planner of a kernel cell's blocks: before each, it divides the time left among the cases.

The pilot's few rounds know neither how noisy a heavy case is nor how noisy the machine will be.
After each block, a case's noise is that of all its rounds so far, and the time left is divided
again (:func:`labkit.experiment.schedule.case_time_allocation.divide`). Only costs and noise count,
never means, so the design does not follow the results. A case that has the blocks of an estimate
and is out of reach ends for good: its blocks are the first ones. If the time is over for all cases,
those that were in reach until then keep a round, because a block without cases cannot run. A block
that is repeated after later ones measures what it measured before.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from labkit.experiment.cell import BlockPlan, ReadyCell
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks
from labkit.experiment.schedule import case_time_allocation
from labkit.experiment.schedule.case_time_allocation import MIN_ROUNDS, CellPilot, Measured
from labkit.records import CaseRecord, Record
from labkit.workload.kernels.interleaved_kernels import NORMAL_SD
from labkit.workload.workload_protocols import CasePilot

Floats = NDArray[np.float64]


@dataclass
class RoundPlanner:
    """Plans a cell's blocks one after the other."""

    cell: ReadyCell
    pilot: CellPilot
    deadline: float  # when the last block is to end, on the clock ``time.monotonic``
    # The cases that are only estimated, with the seconds of a study that would decide them.
    estimates: Mapping[str, float] = field(default_factory=dict)
    _ratios: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    _rounds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _last: dict[str, int] = field(default_factory=dict)  # the last block that measured a case
    _measuring: list[int] = field(default_factory=list)  # the blocks that did not fail
    _blocks: int = 0
    _planned_s: float = 0.0
    _spent_s: float = 0.0

    def add_finished(self, records: Sequence[Record]) -> None:
        for _, block in groupby(records, key=lambda record: record.block):
            self._add_block(list(block))

    def plan(self, block: int, stopped: Collection[str], arms: int) -> BlockPlan:
        """Return the plan of a block.

        ``stopped``: the cases that a look before it has decided. ``arms``: how many arms it has.
        """
        slowness = self._spent_s / self._planned_s if self._planned_s > 0 else 1.0
        left_s = (self.deadline - time.monotonic()) / slowness
        cases = tuple(map(self._case_now, self.pilot.pooled.cases))
        pilot = replace(self.pilot, cases=cases).for_share(arms / len(self.cell.arms))
        ended = self._ended_before(block) | set(stopped)
        measured = Measured(self._blocks, self._rounds, ended)
        design = self.cell.design
        allocation = case_time_allocation.divide(
            pilot, design, self.cell.tested_arms, arms, left_s, design.blocks, measured
        )
        rounds = {
            share.case: case_time_allocation.balanced(share.rounds, arms)
            for share in allocation.cases
            if share.blocks > len(self._rounds.get(share.case, ()))
        }
        is_repeated = block < max(self._measuring, default=block)
        kept = self._kept(ended, stopped) if is_repeated or not rounds else []
        few = fewest_blocks(design, self.cell.tested_arms)
        ended_early = {case: s for case, s in self.estimates.items() if case in ended}
        estimates = ended_early | allocation.estimates(few)
        self.estimates = {case: s for case, s in estimates.items() if case not in kept}
        return BlockPlan(
            dict.fromkeys(kept, MIN_ROUNDS) | rounds,
            pilot.start_s,
            {case.case: case.round_s for case in pilot.cases},
            {case.case: case.warm_up_s for case in pilot.cases},
        )

    def ended(
        self,
        plan: BlockPlan,
        records: Sequence[Record],
        seconds: float,
        suspended_s: float = 0.0,
    ) -> None:
        """Add a block that followed its plan and took so many seconds.

        ``suspended_s``: those of them in which ctrl-Z suspended it.
        """
        self._planned_s += plan.seconds
        self._spent_s += seconds - suspended_s
        self.deadline += suspended_s
        self._add_block(records)

    def _ended_before(self, block: int) -> set[str]:
        """Return the cases that blocks up to this one have left out for good."""
        return {
            case
            for case, last in self._last.items()
            if any(last < other <= block for other in self._measuring)
        }

    def _kept(self, ended: Collection[str], stopped: Collection[str]) -> list[str]:
        """Return the cases that a block measures even if there is no time for them."""
        cases = [case.case for case in self.pilot.cases if case.case not in stopped]
        left = [case for case in cases if case not in ended]
        return [case for case in left if case not in self.estimates] or left or cases

    def _add_block(self, records: Sequence[Record]) -> None:
        self._blocks += 1
        states: dict[str, dict[str | None, list[CaseRecord]]] = {}
        for record in records:
            for case in record.cases:
                if case.metrics:
                    (name,) = self.cell.cases_of([case.case])
                    state = str(case.notes.get("state"))
                    states.setdefault(name, {}).setdefault(state, []).append(case)
        for name, by_state in states.items():
            counts = [len(_times(case)) for cases in by_state.values() for case in cases]
            self._rounds[name].append(min(counts))
            self._last[name] = max(records[0].block, self._last.get(name, 0))
            self._ratios[name] += [_log_ratios(cases) for cases in by_state.values()]
        if states:  # else the block failed, which ends no case
            self._measuring.append(records[0].block)

    def _case_now(self, case: CasePilot) -> CasePilot:
        """Return what the pilot knows of a case, with the noise of all rounds so far."""
        blocks = _centred(self._ratios[case.case])
        if not blocks:
            return case
        seen = np.concatenate([np.abs(one).ravel() for one in blocks])
        rounds = sum(one.shape[1] for one in blocks)
        # Each block's median takes one degree of freedom.
        variance = (NORMAL_SD * float(np.median(seen))) ** 2 * rounds / (rounds - len(blocks))
        # The pilot's few rounds may hold a disturbance: a mean of the logarithms follows it less.
        weight = rounds / (case.rounds + rounds)
        return replace(case, sd=case.sd ** (1 - weight) * math.sqrt(variance) ** weight)


def _times(case: CaseRecord) -> Sequence[float]:
    return next(metric.repeats for metric in case.metrics if metric.primary)


def _log_ratios(cases: Iterable[CaseRecord]) -> Floats:
    """Return a case's log ratios of the other arms to the first in a block, [arms - 1, rounds]."""
    logs = [np.log(_times(case)) for case in cases]
    rounds = min(len(one) for one in logs)
    times = np.asarray([one[:rounds] for one in logs], np.float64)
    ratios: Floats = times[1:] - times[0]
    return ratios


def _centred(blocks: Sequence[Floats]) -> list[Floats]:
    """Return the deviations of log ratios from their median in a block.

    Blocks of a single round, which has no deviation, are one block together: so the noise of a
    case that is only estimated is known, too, with that of the processes in it.
    """
    single = [one for one in blocks if one.shape[1] == 1]
    several = [one for one in blocks if one.shape[1] > 1]
    if len(single) > 1 and len({len(one) for one in single}) == 1:
        several.append(np.hstack(single))
    return [one - np.median(one, axis=1, keepdims=True) for one in several if len(one)]
