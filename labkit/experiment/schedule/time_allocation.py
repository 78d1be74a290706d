"""Division of a cell's time (``design.time``) among processes, and of a process among cases.

A pilot measures what a process costs to start and, for every case, what a round of all arms costs
and how much the rounds vary. Means are never used: they would let the design follow the results.

A case counts as decided when its interval lies inside the margin, or excludes 0. Without a
difference, the first happens with a probability that follows from the half-width of the interval.
The half-width after ``b`` processes of ``r`` rounds is ``critical(b)`` standard errors. A process's
value has two parts of variance: that of the mean of the middle half of its rounds, ``(1.15 sd)^2 /
r``, and one that more rounds do not average out, which a single pilot cannot see and committed
records show (``PROCESS_SD``). So many short processes decide more than few long ones, as long as
starting one is cheap. For each number of processes, the cases share the time in equal parts, for
noise is known only roughly; what one does not need goes to the others. The number that decides
most cases is chosen. A case whose part is too short gets a single round in a few processes: an
estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from scipy.special import ndtr, ndtri, stdtrit

from labkit.analysis.statistics.power import attained_alpha
from labkit.config import Design
from labkit.experiment.cell import MAX_ROUNDS
from labkit.experiment.compose.reachable_looks import (
    LOOK_ALPHA_SHARE,
    MIN_BLOCKS_WITH_LOOK,
    fewest_blocks,
)
from labkit.workload.measurement import CasePilot

PROCESS_SD = 0.006  # log ratio: 0.5 to 0.9 % in processes of 400 to 1,000 rounds
POOLED_ROUNDS = 5
ESTIMATE_ERROR = 1.15  # standard error of the mean of the middle half over that of the mean
SPARE = 2.0  # rounds per round needed: a pilot's few rounds know the noise only roughly
MIN_ROUNDS, MIN_ROUNDS_IN_REACH = 1, 2  # of a case that is only estimated, and of others
MIN_ROUNDS_TO_DECIDE = 6  # fewer have no middle half to speak of
MAX_BLOCKS, USUAL_BLOCKS = 24, 12
LIKELY = 0.8  # probability with which a case that gets all it needs is decided


@dataclass(frozen=True)
class CellPilot:
    """Seconds that a process takes besides its cases, and what is known of each case."""

    start_s: float
    cases: tuple[CasePilot, ...]

    @property
    def pooled(self) -> CellPilot:
        """The pilot with noise that is less certain, but never near 0 by chance.

        A case's variance is averaged with the median variance of all cases, as if that came from
        ``POOLED_ROUNDS`` more rounds: heavy cases have three rounds of their own.
        """
        common = median(case.sd**2 for case in self.cases)
        cases = (
            replace(
                case,
                sd=math.sqrt(
                    (case.rounds * case.sd**2 + POOLED_ROUNDS * common)
                    / (case.rounds + POOLED_ROUNDS)
                ),
            )
            for case in self.cases
        )
        return replace(self, cases=tuple(cases))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellPilot:
        """Return the pilot that a worker wrote."""
        return cls(float(data["start_s"]), tuple(CasePilot(**case) for case in data["cases"]))


@dataclass(frozen=True)
class CaseShare:
    """A case's part of the time.

    ``blocks``: number of processes that measure the case, from the first. ``rounds``: its rounds in
    each of them. ``p_decided``: probability that the case is decided if the arms do not differ.
    ``needed_s``: seconds that deciding it would take, in all processes.
    """

    case: str
    blocks: int
    rounds: int
    p_decided: float
    needed_s: float


@dataclass(frozen=True)
class Allocation:
    """A cell's processes (``blocks``), each case's share, and the estimated seconds of the cell."""

    blocks: int
    cases: tuple[CaseShare, ...]
    seconds: float

    @property
    def expected_decisions(self) -> float:
        """The number of cases that are decided if the arms do not differ."""
        return sum(share.p_decided for share in self.cases)


def allocate(
    pilot: CellPilot, design: Design, arms: int, time_s: float | None, blocks: int | None = None
) -> Allocation:
    """Return the division of ``time_s`` seconds that decides most cases.

    Parameters
    ----------
    arms
        The number of arms that are tested together.
    time_s
        The seconds left; None: as many as all cases need.
    blocks
        The number of processes, if it is fixed.
    """
    counts = [blocks] if blocks is not None else range(fewest_blocks(design, arms), MAX_BLOCKS + 1)
    options = [_divide(pilot, design, arms, time_s, count) for count in counts]
    affordable = [one for one in options if time_s is None or one.seconds <= time_s]
    # Of almost equal ones, that near the usual number: fewer processes would rely on the pilot's
    # single process, which cannot see how much processes differ.
    return max(
        affordable or options[:1],
        key=lambda one: (round(one.expected_decisions, 1), -abs(one.blocks - USUAL_BLOCKS)),
    )


def _divide(
    pilot: CellPilot, design: Design, arms: int, time_s: float | None, blocks: int
) -> Allocation:
    """Return the division for a number of processes.

    The cases share the time of a process in equal parts; what a case does not need goes to the
    others. A case whose part is too short for ``MIN_ROUNDS_IN_REACH`` rounds, the dearest first,
    is only estimated, in as many processes as a claim needs.
    """
    errors = _Errors.of(design, arms, blocks, len(pilot.cases))
    few = min(fewest_blocks(design, arms), blocks)
    in_reach, estimated = sorted(pilot.cases, key=lambda case: case.round_s), list[CasePilot]()
    while True:
        estimates_s = sum(few * (case.warm_up_s + MIN_ROUNDS * case.round_s) for case in estimated)
        fixed_s = pilot.start_s + sum(case.warm_up_s for case in in_reach)
        process_s = math.inf if time_s is None else (time_s - estimates_s) / blocks - fixed_s
        rounds = _equal_parts(in_reach, process_s, errors)
        if not in_reach or min(rounds.values()) >= MIN_ROUNDS_IN_REACH:
            break
        estimated.append(in_reach.pop())
    shares = {case.case: _share(case, few, MIN_ROUNDS, errors) for case in estimated}
    shares |= {case.case: _share(case, blocks, rounds[case.case], errors) for case in in_reach}
    ordered = tuple(shares[case.case] for case in pilot.cases)
    costs = (_cost_s(case, shares[case.case]) for case in pilot.cases)
    return Allocation(blocks, ordered, blocks * pilot.start_s + sum(costs))


def _equal_parts(cases: Sequence[CasePilot], process_s: float, errors: _Errors) -> dict[str, int]:
    """Return the rounds of each case in a process whose rounds may take ``process_s`` seconds."""
    enough = {case.case: errors.rounds_needed(case.sd) for case in cases}
    rounds, left_s, waiting = dict[str, int](), process_s, list(cases)
    while waiting:
        part_s = left_s / len(waiting)
        done = [case for case in waiting if enough[case.case] * case.round_s <= part_s]
        if not done:
            return rounds | {
                case.case: errors.balanced(max(0, int(part_s / case.round_s))) for case in waiting
            }
        rounds |= {case.case: enough[case.case] for case in done}
        left_s -= sum(enough[case.case] * case.round_s for case in done)
        waiting = [case for case in waiting if case.case not in rounds]
    return rounds


def _share(case: CasePilot, blocks: int, rounds: int, errors: _Errors) -> CaseShare:
    needed_s = errors.blocks * (errors.rounds_needed(case.sd) * case.round_s + case.warm_up_s)
    p_decided = errors.p_decided(case.sd, blocks, rounds)
    return CaseShare(case.case, blocks, rounds, p_decided, needed_s)


def _cost_s(case: CasePilot, share: CaseShare) -> float:
    return share.blocks * (case.warm_up_s + share.rounds * case.round_s)


def p_decided(design: Design, arms: int, blocks: int, sd: float, rounds: int) -> float:
    """Return the probability that a single case is decided if the arms do not differ."""
    return _Errors.of(design, arms, blocks, 1).p_decided(sd, blocks, rounds)


@dataclass(frozen=True)
class _Errors:
    """The errors of a design: ``critical`` standard errors are the half-width of an interval."""

    blocks: int
    critical: float
    margin: float  # log ratio
    turns: int  # of a round: in as many rounds every arm has every position once

    @classmethod
    def of(cls, design: Design, arms: int, blocks: int, cases: int) -> _Errors:
        alpha = design.alpha * (1 - LOOK_ALPHA_SHARE * (blocks >= MIN_BLOCKS_WITH_LOOK))
        level = attained_alpha(blocks, design.runs_per_block, alpha / arms) / max(1, cases)
        runs = blocks * design.runs_per_block
        df = blocks * (2 * design.runs_per_block - 1) - 1
        critical = float(stdtrit(df, 1 - level / 2)) if level > 0 else math.inf
        turns = arms + 1 + design.control
        return cls(runs, critical, math.log1p(design.margin_pct / 100), turns)

    def p_decided(self, sd: float, blocks: int, rounds: int) -> float:
        """Return the probability that the interval lies inside the margin without a difference.

        ``rounds``: those of each of ``blocks`` processes.
        """
        error = math.sqrt((PROCESS_SD**2 + (ESTIMATE_ERROR * sd) ** 2 / rounds) / blocks)
        room = self.margin - self.critical * error if error > 0 else self.margin
        if room <= 0:
            return 0.0
        return float(2 * ndtr(room / error) - 1) if error > 0 else 1.0

    def rounds_needed(self, sd: float) -> int:
        """Return the rounds per process with which a case is decided, with some to spare."""
        if not math.isfinite(self.critical):
            return MAX_ROUNDS
        errors = self.critical + float(ndtri((1 + LIKELY) / 2))
        # The variance that the rounds of a process may leave.
        variance = self.blocks * (self.margin / errors) ** 2 - PROCESS_SD**2
        if variance <= 0:
            return MAX_ROUNDS
        rounds = (ESTIMATE_ERROR * sd) ** 2 / variance
        rounds = self.turns * math.ceil(max(MIN_ROUNDS_TO_DECIDE, SPARE * rounds) / self.turns)
        return min(MAX_ROUNDS, rounds)

    def balanced(self, rounds: int) -> int:
        """Return at most ``rounds`` rounds, in which every arm has every position equally often."""
        return rounds - rounds % self.turns if rounds >= self.turns else rounds
