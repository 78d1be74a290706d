"""Division of a cell's time (``design.time``) among processes, and of a process among cases.

A pilot measures what a process costs to start and, for every case, what a round of all arms costs
and how much the rounds vary. Means are never used: they would let the design follow the results.

A case counts as decided when its interval lies inside the margin, or excludes 0. Without a
difference, the first happens with a probability that follows from the half-width of the interval.
The half-width after ``b`` processes of ``r`` rounds is ``critical(b)`` standard errors. A process's
value has two parts of variance: that of the mean of the middle half of its rounds, ``(1.15 sd)^2 /
r``, and one that more rounds do not average out, which a single pilot cannot see and committed
records show (``PROCESS_SD``, ``APART_SD``). So many short processes decide more than few long ones,
as long as starting one is cheap. For each number of processes, the cases that need least time get
what they need; then the next one gets what is left, if that is a good part of what it needs. The
number that decides most cases is chosen. A case out of reach gets a single round in a few
processes: an estimate. The time that remains is divided again after each block, with the noise of
all rounds so far (:mod:`labkit.experiment.schedule.rounds_per_block`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from scipy.special import ndtr, ndtri, stdtrit

from labkit.analysis.statistics.power import attained_alpha
from labkit.config import Design, Isolation
from labkit.experiment.cell import MAX_ROUNDS
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks, planned_looks
from labkit.workload.workload_protocols import CasePilot

PROCESS_SD = 0.008  # log ratio: 0.5 to 1 % in processes of 20 to 1,000 rounds
APART_SD = 0.024  # of arms in processes of their own that take turns; the least if they do not
APART = (Isolation.live, Isolation.process)
POOLED_ROUNDS = 5
ESTIMATE_ERROR = 1.15  # standard error of the mean of the middle half over that of the mean
MIN_ROUNDS, MIN_ROUNDS_IN_REACH = 1, 2  # of a case that is only estimated, and of others
MIN_ROUNDS_TO_DECIDE = 6  # fewer have no middle half to speak of
LEFT_BY_ROUNDS = 0.25  # of a process's own variance: rounds that leave less are of no use
BISECTIONS = 20
TIMEOUT_SHARE = 0.5  # of what a launch may take: it may turn out to be slower
SPARE = 2.0  # rounds per round needed before cases out of reach get any
WORTHWHILE = 1 / 3  # of the rounds that a case needs: with fewer it stays an estimate
MAX_BLOCKS, USUAL_BLOCKS = 24, 12
LIKELY = 0.8  # probability from which a case is said to be decided
WANTED = 0.9  # probability of being decided that a case's rounds are to give
NOISE_FACTORS = (0.7, 1.0, 1.4)  # noise to come over the noise seen, about equally likely


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

    def for_share(self, share: float, starts: float = 1.0) -> CellPilot:
        """Return the pilot of a cell with a share of the arms (above 1: more) and the starts."""
        cases = (
            replace(case, round_s=share * case.round_s, warm_up_s=share * case.warm_up_s)
            for case in self.cases
        )
        return CellPilot(starts * self.start_s, tuple(cases))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellPilot:
        return cls(float(data["start_s"]), tuple(CasePilot(**case) for case in data["cases"]))


@dataclass(frozen=True)
class CaseShare:
    """A case's part of the time."""

    case: str
    blocks: int  # processes that measure the case, from the first
    rounds: int  # in each of them
    p_decided: float  # probability that the case is decided if the arms do not differ
    needed_s: float  # that deciding it would take, in all processes


@dataclass(frozen=True)
class Allocation:
    """A cell's processes (``blocks``), each case's share, and the estimated seconds of the cell."""

    blocks: int
    cases: tuple[CaseShare, ...]
    seconds: float

    def estimates(self, few: int) -> dict[str, float]:
        """Return the cases that are only estimated, with the seconds that deciding them would take.

        They have at most ``few`` blocks, or at most half of all blocks.
        """
        most = min(max(few, self.blocks // 2), self.blocks - 1)
        return {share.case: share.needed_s for share in self.cases if share.blocks <= most}

    @property
    def expected_decisions(self) -> float:
        """The number of cases that are decided if the arms do not differ."""
        return sum(share.p_decided for share in self.cases)


@dataclass(frozen=True)
class Measured:
    """What a cell's finished blocks hold."""

    blocks: int = 0
    rounds: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of each case, in each block
    ended: Collection[str] = ()  # the cases that are not measured any longer


def allocate(
    pilot: CellPilot,
    design: Design,
    arms: int,
    turns: int,
    time_s: float | None,
    blocks: int | None = None,
) -> Allocation:
    """Return the division of ``time_s`` seconds that decides most cases; None: all they need.

    ``arms``: how many are tested together. ``turns``: how many a round has, one for each arm.
    ``blocks``: the number of processes, if it is fixed.
    """
    counts = [blocks] if blocks is not None else range(fewest_blocks(design, arms), MAX_BLOCKS + 1)
    options = [divide(pilot, design, arms, turns, time_s, n) for n in counts]
    return best_allocation(options, time_s)


def best_allocation(options: Sequence[Allocation], time_s: float | None) -> Allocation:
    """Return the option that decides most cases in ``time_s`` seconds; the first if none fits.

    Of almost equal ones, that near the usual number of blocks: fewer processes would rely on the
    pilot's single process, which cannot see how much processes differ.
    """
    affordable = [one for one in options if time_s is None or one.seconds <= time_s]
    return max(
        affordable or options[:1],
        key=lambda one: (round(one.expected_decisions, 1), -abs(one.blocks - USUAL_BLOCKS)),
    )


def divide(
    pilot: CellPilot,
    design: Design,
    arms: int,
    turns: int,
    time_s: float | None,
    blocks: int,
    measured: Measured = Measured(),
) -> Allocation:
    """Return the division of ``time_s`` seconds among the blocks that are left of ``blocks``.

    The shares are those of the cases that have not ended.
    """
    errors = _Errors.of(design, arms, blocks, len(pilot.cases), turns)
    few, left = min(fewest_blocks(design, arms), blocks), blocks - measured.blocks
    needs = [
        _Need.of(case, errors, left, few, measured.rounds.get(case.case, ()))
        for case in pilot.cases
        if case.case not in measured.ended
    ]
    least_s = left * pilot.start_s + sum(need.estimate_s for need in needs)
    # A launch has a run of every arm, and is killed after design.timeout_s for each of them.
    most_s = left * TIMEOUT_SHARE * design.timeout_s * turns
    budget_s = math.inf if time_s is None else min(time_s, most_s) - least_s
    rounds = _rounds(needs, budget_s, turns)
    shares = [need.share(rounds.get(need.case.case), errors, blocks) for need in needs]
    costs = (
        need.seconds(rounds[need.case.case]) if need.case.case in rounds else need.estimate_s
        for need in needs
    )
    seconds = left * pilot.start_s + sum(costs)
    if time_s is None and seconds > most_s:
        return divide(pilot, design, arms, turns, most_s, blocks, measured)
    return Allocation(blocks, tuple(shares), seconds)


def _rounds(needs: Sequence[_Need], budget_s: float, turns: int) -> dict[str, int]:
    """Return the rounds per block of the cases in reach, for the time that estimates leave.

    The cheapest get what they need, then the next one a good part of it, then those in reach some
    more, then the others what it buys, however little; what is still left goes to all of these
    until they take equally long, as far as it is of use.
    """
    rounds, waiting = dict[str, int](), sorted(needs, key=lambda need: need.extra_s)
    while waiting and waiting[0].extra_s <= budget_s:
        need = waiting.pop(0)
        rounds[need.case.case] = need.rounds
        budget_s -= need.extra_s
    for worthwhile in (WORTHWHILE, 0.0):
        for need in list(waiting):
            affordable = min(need.rounds, need.most, balanced(need.affordable(budget_s), turns))
            if affordable >= max(MIN_ROUNDS_IN_REACH, worthwhile * need.rounds):
                rounds[need.case.case] = affordable
                budget_s -= need.seconds(affordable) - need.estimate_s
                waiting.remove(need)
        if worthwhile:
            budget_s -= _spend_spare(needs, rounds, budget_s, turns)
    if math.isfinite(budget_s):
        _level(needs, rounds, budget_s, turns)
    return rounds


def _level(needs: Sequence[_Need], rounds: dict[str, int], budget_s: float, turns: int) -> None:
    """Spend the budget on the cases whose rounds take least time, up to a common time.

    A disturbance lasts longer than a few short launches.
    """
    measured = [need for need in needs if need.case.case in rounds]

    def levelled(block_s: float) -> dict[str, int]:
        return {
            need.case.case: max(
                rounds[need.case.case],
                min(need.most, balanced(int(block_s / need.case.round_s), turns)),
            )
            for need in measured
        }

    before_s = sum(need.seconds(rounds[need.case.case]) for need in measured)
    low_s = 0.0
    high_s = 2 * max((need.most * need.case.round_s for need in measured), default=0.0)
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        counts = levelled(middle_s)
        seconds = sum(need.seconds(counts[need.case.case]) for need in measured)
        low_s, high_s = (middle_s, high_s) if seconds - before_s <= budget_s else (low_s, middle_s)
    rounds.update(levelled(low_s))


def _spend_spare(
    needs: Sequence[_Need], rounds: dict[str, int], budget_s: float, turns: int
) -> float:
    """Give the cases in reach up to ``SPARE`` times their rounds; return the seconds it takes."""
    in_reach = [need for need in needs if need.case.case in rounds]
    before_s = sum(need.seconds(rounds[need.case.case]) for need in in_reach)
    rounds_s = before_s - sum(need.seconds(0) for need in in_reach)
    spare = min(SPARE, 1 + budget_s / rounds_s) if rounds_s > 0 else 1.0
    for need in in_reach:
        count = rounds[need.case.case]
        wanted = balanced(int(spare * count), turns)
        rounds[need.case.case] = max(count, min(need.most, wanted))
    return sum(need.seconds(rounds[need.case.case]) for need in in_reach) - before_s


def balanced(rounds: int, turns: int) -> int:
    """Return at most ``rounds`` rounds, in which every arm has every position equally often."""
    return rounds - rounds % turns if rounds >= turns else rounds


@dataclass(frozen=True)
class _Need:
    """What deciding a case takes."""

    case: CasePilot
    left: int  # blocks to come
    looks: int  # those of them that measure the case even if it is out of reach
    rounds: int  # in each block to come, which would decide it
    most: int  # rounds beyond which more are of no use
    done: Sequence[int]  # its rounds in the finished blocks

    @classmethod
    def of(
        cls, case: CasePilot, errors: _Errors, left: int, few: int, done: Sequence[int]
    ) -> _Need:
        """Return the need of a case that has ``done`` rounds in the finished blocks."""
        looks, most = min(left, max(0, few - len(done))), errors.most_rounds(case.sd)
        return cls(case, left, looks, errors.rounds_needed(case.sd, left, done), most, done)

    def seconds(self, rounds: int) -> float:
        return self.left * (self.case.warm_up_s + rounds * self.case.round_s)

    @property
    def estimate_s(self) -> float:
        return self.looks * (self.case.warm_up_s + MIN_ROUNDS * self.case.round_s)

    @property
    def extra_s(self) -> float:
        return self.seconds(self.rounds) - self.estimate_s

    def affordable(self, extra_s: float) -> int:
        """Return the rounds per block that fit into so many seconds more than an estimate's."""
        block_s = (extra_s + self.estimate_s) / self.left - self.case.warm_up_s
        return max(0, int(block_s / self.case.round_s))

    def share(self, rounds: int | None, errors: _Errors, blocks: int) -> CaseShare:
        """Return the case's share with so many rounds in each block; None: an estimate."""
        sd, looks = self.case.sd, self.left if rounds is not None else self.looks
        count = MIN_ROUNDS if rounds is None else rounds
        p_decided = errors.p_decided(sd, (*self.done, *(looks * [count])))
        whole = errors.rounds_needed(sd, blocks, ())
        needed_s = blocks * (whole * self.case.round_s + self.case.warm_up_s)
        return CaseShare(self.case.case, len(self.done) + looks, count, p_decided, needed_s)


def p_decided(design: Design, arms: int, blocks: int, sd: float, rounds: int) -> float:
    """Return the probability that a single case is decided if the arms do not differ."""
    return _Errors.of(design, arms, blocks).p_decided(sd, blocks * (rounds,))


@dataclass(frozen=True)
class _Errors:
    """The errors of a design."""

    runs: int  # of an arm in all blocks
    runs_per_block: int
    critical: float  # so many standard errors are the half-width of an interval
    margin: float  # log ratio
    turns: int  # of a round; in as many rounds every arm has every position once
    process_sd: float  # what rounds do not average out, as a log ratio

    @classmethod
    def of(cls, design: Design, arms: int, blocks: int, cases: int = 1, turns: int = 1) -> _Errors:
        known = blocks == design.blocks  # else the looks are still to follow from the time
        looks = design.all_looks if known else planned_looks(design, arms, blocks)
        alpha = next((look.alpha for look in looks if look.blocks == blocks), design.alpha)
        level = attained_alpha(blocks, design.runs_per_block, alpha / arms) / max(1, cases)
        runs = blocks * design.runs_per_block
        df = blocks * (2 * design.runs_per_block - 1) - 1
        critical = float(stdtrit(df, 1 - level / 2)) if level > 0 else math.inf
        margin = math.log1p(design.margin_pct / 100)
        process_sd = APART_SD if design.isolation in APART else PROCESS_SD
        return cls(runs, design.runs_per_block, critical, margin, turns, process_sd)

    def p_decided(self, sd: float, rounds: Sequence[int]) -> float:
        """Return the probability that the interval lies inside the margin without a difference.

        ``rounds``: those of each block that measures the case.
        """
        if not rounds:
            return 0.0
        return fmean(self._p_decided(factor * sd, rounds) for factor in NOISE_FACTORS)

    def _p_decided(self, sd: float, rounds: Sequence[int]) -> float:
        error = math.sqrt(self._variance(sd, rounds)) / (self.runs_per_block * len(rounds))
        room = self.margin - self.critical * error if error > 0 else self.margin
        if room <= 0:
            return 0.0
        return float(2 * ndtr(room / error) - 1) if error > 0 else 1.0

    def _variance(self, sd: float, rounds: Sequence[int]) -> float:
        """Return the variance of the sum of the values of all runs."""
        of_runs = (self.process_sd**2 + (ESTIMATE_ERROR * sd) ** 2 / count for count in rounds)
        return self.runs_per_block * sum(of_runs)

    def most_rounds(self, sd: float) -> int:
        """Return the rounds of a process whose variance is small beside the process's own."""
        rounds = (ESTIMATE_ERROR * sd) ** 2 / (LEFT_BY_ROUNDS * self.process_sd**2)
        return self._whole_turns(max(SPARE * MIN_ROUNDS_TO_DECIDE, rounds))

    def _whole_turns(self, rounds: float) -> int:
        return min(MAX_ROUNDS, self.turns * math.ceil(rounds / self.turns))

    def rounds_needed(self, sd: float, left: int, done: Sequence[int]) -> int:
        """Return the rounds in each of the blocks left with which a case is decided.

        ``done``: the case's rounds in the finished blocks.
        """
        if not math.isfinite(self.critical):
            return MAX_ROUNDS
        errors = self.critical + float(ndtri((1 + WANTED) / 2))
        whole = (self.runs * self.margin / errors) ** 2 - self._variance(sd, done)
        # The variance that the rounds of a process may leave.
        variance = whole / (self.runs_per_block * left) - self.process_sd**2
        if variance <= 0:
            return MAX_ROUNDS
        rounds = (ESTIMATE_ERROR * sd) ** 2 / variance
        return self._whole_turns(max(MIN_ROUNDS_TO_DECIDE, rounds))
