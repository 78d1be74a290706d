"""Division of a cell's time (``design.time``) among processes, and of a process among cases.

A pilot measures what a process costs to start and, for every case, what a round of all arms costs
and how much the rounds vary. Means are never used: they would let the design follow the results.

A case counts as decided when its interval lies inside the margin, or excludes 0. Without a
difference, the first happens with a probability that follows from the half-width of the interval.
The half-width after ``b`` processes of ``r`` rounds is ``critical(b)`` standard errors. A process's
value has two parts of variance: that of the mean of the middle half of its rounds, ``(1.15 sd)^2 /
r``, and one that more rounds do not average out, which a single pilot cannot see and committed
records show (``PROCESS_SD``). So many short processes decide more than few long ones, as long as
starting one is cheap. For each number of processes, the cases that are decided
soonest get the rounds that they need, and the next one gets what is left. The number that decides
most cases is chosen. A case for which the time does not suffice gets a few rounds: an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
SPARE = 1.15  # rounds per round needed: a pilot's few rounds know the noise only roughly
MIN_ROUNDS = 1  # of a case that is only estimated
MIN_ROUNDS_TO_DECIDE = 6  # fewer have no middle half to speak of
MAX_BLOCKS, USUAL_BLOCKS = 24, 12
LIKELY = 0.8  # probability with which a case that gets all it needs is decided
WORTH = 0.2  # smallest probability for which a case gets a part of what it needs


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

    Every case is first estimated by a few rounds in as many processes as a claim needs. Then the
    cases get the rounds that they need, as long as the time suffices, the cheapest first.
    """
    errors, few = _Errors.of(design, arms, blocks, len(pilot.cases)), fewest_blocks(design, arms)
    few = min(few, blocks)
    shares = {
        case.case: CaseShare(
            case.case, few, MIN_ROUNDS, errors.p_decided(case.sd, few, MIN_ROUNDS), 0.0
        )
        for case in pilot.cases
    }
    pilots = {case.case: case for case in pilot.cases}
    spent_s = blocks * pilot.start_s + sum(_cost_s(pilots[s.case], s) for s in shares.values())
    left_s = math.inf if time_s is None else time_s - spent_s
    full = [_with_rounds(case, blocks, errors) for case in pilot.cases]
    for share in sorted(full, key=lambda share: share.needed_s):
        case = pilots[share.case]
        more_s = _cost_s(case, share) - _cost_s(case, shares[share.case])
        if more_s > left_s:  # a part may do
            rounds = share.rounds - math.ceil((more_s - left_s) / (blocks * case.round_s))
            if rounds <= MIN_ROUNDS or (p := errors.p_decided(case.sd, blocks, rounds)) < WORTH:
                shares[share.case] = replace(shares[share.case], needed_s=share.needed_s)
                continue
            share = replace(share, rounds=rounds, p_decided=p)
            more_s = _cost_s(case, share) - _cost_s(case, shares[share.case])
        shares[share.case] = share
        left_s -= more_s
    if time_s is not None:
        shares = _with_rest(shares, pilots, blocks, left_s, errors)
    seconds = blocks * pilot.start_s + sum(_cost_s(pilots[s.case], s) for s in shares.values())
    return Allocation(blocks, tuple(shares.values()), seconds)


def _with_rest(
    shares: Mapping[str, CaseShare],
    pilots: Mapping[str, CasePilot],
    blocks: int,
    left_s: float,
    errors: _Errors,
) -> dict[str, CaseShare]:
    """Divide the time that is left among the cases of all processes, in equal parts."""
    able = [s.case for s in shares.values() if s.blocks == blocks and s.rounds < MAX_ROUNDS]
    result = dict(shares)
    for case in able:
        share, part_s = shares[case], max(0.0, left_s) / len(able)
        rounds = share.rounds + int(part_s / (blocks * pilots[case].round_s))
        rounds = min(MAX_ROUNDS, rounds)
        p_decided = errors.p_decided(pilots[case].sd, blocks, rounds)
        result[case] = replace(share, rounds=rounds, p_decided=p_decided)
    return result


def _with_rounds(case: CasePilot, blocks: int, errors: _Errors) -> CaseShare:
    """Return the share with which a case is decided."""
    rounds = errors.rounds_needed(case.sd)
    needed_s = blocks * (rounds * case.round_s + case.warm_up_s)
    rounds = min(rounds, MAX_ROUNDS)
    return CaseShare(case.case, blocks, rounds, errors.p_decided(case.sd, blocks, rounds), needed_s)


def _cost_s(case: CasePilot, share: CaseShare) -> float:
    return share.blocks * (case.warm_up_s + share.rounds * case.round_s)


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
        return self.turns * math.ceil(max(MIN_ROUNDS_TO_DECIDE, SPARE * rounds) / self.turns)
