"""Simulated error rates of whole studies whose arms are interleaved, from rounds to verdicts.

A study has a baseline, an arm and a control. In each process every round holds one turn of each
arm, in the orders that :class:`labkit.workload.turn_order.RandomTurnOrder` draws. The turn that
comes first is slower, whichever arm has it. The studies go through position effects, medians over
rounds, tests, looks and verdicts as a report does. Fixed seeds; the quick sizes run always, the
figures of ``docs/statistical-methods.md`` are those of the slow ones (2,000 studies each).
"""

import math
import random
import sys
from functools import partial

import numpy as np
import pytest

from labkit.analysis.comparison import observations
from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.observations import MetricRow, RunValue, without_position_effects
from labkit.analysis.comparison.verdict import judge
from labkit.analysis.statistics.hodges_lehmann import to_log_ratio
from labkit.experiment.launch.turn_coordinator import LiveSet
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.workload.turn_order import Part, RandomTurnOrder

pytestmark = pytest.mark.usefixtures("fewer_relabellings")

ARMS = ("base", "arm", "control")
LOOKS = ((8, 0.02), (10, 0.03))  # conf/design/standard.yaml, interleaved
PROCESSES = LOOKS[-1][0]
MARGIN = 2.0
ROUND_SD, TURN_SD, PROCESS_SD = 0.02, 0.02, 0.005
ROUNDS = (3, 5, 7, 10, 16, 32)
QUICK, STUDIES = 200, 2_000


def positions_of(order, rounds):
    """Return the arms' positions in one process, int [arms, rounds], as a study draws them."""
    part = Part("case", rounds, tuple(range(len(ARMS))))
    drawn = RandomTurnOrder(order).rounds([part])
    return np.array([[place for _, place in sorted(each.turns)] for each in drawn]).T


def simulate_processes(seed, rounds, place_pct=8.0, effect=0.0, noise="plain", processes=PROCESSES):
    """Return logs, float64 [processes, arms, rounds], and positions of the same shape."""
    rng, order = np.random.default_rng([seed, rounds]), random.Random(f"{seed} {rounds}")
    shape = (processes, len(ARMS), rounds)
    positions = np.stack([positions_of(order, rounds) for _ in range(processes)])
    turns = rng.normal(0, TURN_SD, shape)
    if noise in ("t2", "t3"):
        turns = rng.standard_t(int(noise[1]), shape) * TURN_SD / 2
    if noise == "autocorrelation":  # of consecutive turns of an arm
        for i in range(1, rounds):
            turns[..., i] = 0.8 * turns[..., i - 1] + 0.6 * turns[..., i]
    if noise == "unequal variances":
        turns[:, 1] *= 3
    logs = rng.normal(0, ROUND_SD, (processes, 1, rounds)) + turns
    own = 4 * PROCESS_SD if noise == "arm by process" else PROCESS_SD
    logs = logs + rng.normal(0, own, (processes, len(ARMS), 1))
    logs += (positions == 0) * to_log_ratio(place_pct)
    if noise == "modes":
        logs += 0.05 * (rng.random((processes, len(ARMS), 1)) < 0.25)
    if noise == "drift":  # over the study, and over every process, turn by turn
        moments = np.arange(rounds) + positions / len(ARMS)
        logs += 0.05 * np.linspace(0, 1, processes)[:, None, None] + 0.1 * moments / rounds
    if noise == "stalls":
        logs += (rng.random(shape) < 0.02) * rng.exponential(0.3, shape)
    logs[:, 1] += effect
    return logs, positions


def as_row(logs, positions):
    times = np.exp(logs)
    return MetricRow("case", "us", "us", "lower", True, paired_baseline="base", arms={
        arm: [
            RunValue(p, 0, "", float(np.median(each)), tuple(each), tuple(positions[p, a]))
            for p, each in enumerate(times[:, a])
        ]
        for a, arm in enumerate(ARMS)
    })  # fmt: skip


DECIDED = {"better", "worse", "equivalent", "trivial"}


def final_answer(row):
    """Return the comparison and verdict at the first look that decides the row, else the last."""
    for blocks, alpha in LOOKS:
        so_far = MetricRow(
            row.case, row.metric, row.unit, row.better, True, paired_baseline="base",
            arms={arm: values[:blocks] for arm, values in row.arms.items()},
        )  # fmt: skip
        so_far._rounds = row._rounds
        criteria = DecisionCriteria(1, alpha, MARGIN)
        (found,), (control,) = (compare_arm([so_far], a, "base", criteria) for a in ARMS[1:])
        word = judge(found, "lower", criteria, [], control).word
        if word in DECIDED:
            break
    return found, word


def simulate(studies, rounds, place_pct, effect, seed, **options):
    for study in range(studies):
        logs, positions = simulate_processes(
            seed * 100_000 + study, rounds, place_pct, effect, **options
        )
        yield final_answer(as_row(logs, positions))


def rates(studies, rounds, place_pct, **options):
    """Return the shares of false verdicts and false equivalents, of intervals with the truth,
    and the mean error of the estimate (percentage points).

    False verdicts are those without an effect; the others are of an effect of the margin.
    """
    null = simulate(studies, rounds, place_pct, 0.0, 1, **options)
    false = np.mean([word in {"better", "worse", "trivial"} for _, word in null])
    moved = list(simulate(studies, rounds, place_pct, to_log_ratio(MARGIN * 1.0001), 2, **options))
    equal = np.mean([word in {"equivalent", "trivial"} for _, word in moved])
    covered = np.mean([found.ci_pct[0] <= MARGIN <= found.ci_pct[1] for found, _ in moved])
    return false, equal, covered, np.mean([found.effect_pct for found, _ in moved]) - MARGIN


def power_as_printed(studies, rounds, place_pct, **options):
    """Return the share of studies that detect the effect which another study of them prints."""
    criteria = DecisionCriteria(1, LOOKS[-1][1], MARGIN)
    lows, printed = [], []
    for study in range(studies):
        row = as_row(*simulate_processes(300_000 + study, rounds, place_pct, **options))
        (found,) = compare_arm([row], "arm", "base", criteria)
        lows.append(to_log_ratio(found.ci_pct[0]))
        printed.append(to_log_ratio(found.mde_pct))
    return np.mean(np.array(printed) + np.array(lows)[:, None] > 0)


def at_most(share, studies, promised=0.05):
    """Return whether a share exceeds the promised one by no more than 3 standard deviations."""
    return share <= promised + 3 * math.sqrt(promised * (1 - promised) / studies)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 16, 33])
def test_an_arms_effect_is_never_read_as_one_of_position(rounds):
    logs, positions = simulate_processes(1, rounds, noise="stalls")
    moved = logs.copy()
    moved[:, 1] += 0.02
    for one, other, places in zip(logs, moved, positions, strict=True):
        change = without_position_effects(other, places) - without_position_effects(one, places)
        assert change[1] == pytest.approx(0.02, abs=1e-12)
        assert change[[0, 2]] == pytest.approx(0, abs=1e-12)


def test_position_effects_are_polished_until_they_no_longer_change(monkeypatch):
    logs, positions = simulate_processes(2, 16)
    found = [without_position_effects(*one) for one in zip(logs, positions, strict=True)]
    for one, other, places in zip(logs, found, positions, strict=True):
        again = without_position_effects(other, places)
        assert np.abs(again - other).max() < 1e-3  # a start elsewhere ends in another flat part
        assert np.ptp((one - other)[places == 0]) < 1e-12
    monkeypatch.setattr(observations, "MAX_POLISH_PASSES", 100_000)
    more = [without_position_effects(*one) for one in zip(logs, positions, strict=True)]
    assert np.array_equal(found, more)


def test_every_arm_has_every_position_equally_often_up_to_one_round():
    for rounds in (3, 5, 16, 32, 96):
        counts = [np.bincount(each, minlength=3) for each in positions_of(random.Random(1), rounds)]
        assert np.ptp(counts) == (rounds % 3 > 0)


@pytest.mark.parametrize("rounds", [3, 5, 16])
def test_interleaved_studies_estimate_without_bias_and_keep_their_error_rates(rounds):
    false, equal, covered, error = rates(QUICK, rounds, 8.0)
    assert at_most(false, QUICK) and at_most(equal, QUICK) and at_most(1 - covered, QUICK)
    assert 0.72 <= power_as_printed(QUICK, rounds, 8.0) <= 0.88
    assert abs(error) < 0.13  # 0.2 to 0.3 if the distances were from the rounds' medians


NOISE = ("t2", "t3", "modes", "drift", "autocorrelation", "arm by process", "unequal variances")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "rounds"),
    [*((n, r) for n in ("plain", "stalls") for r in ROUNDS), *((n, 16) for n in NOISE)],
)
def test_error_rates_of_interleaved_studies(noise, rounds):
    """Print a line of the table in docs/statistical-methods.md (``pytest -m slow -s``)."""
    false, equal, covered, error = rates(STUDIES, rounds, 8.0, noise=noise)
    power = power_as_printed(STUDIES // 2, rounds, 8.0, noise=noise)
    shares = " | ".join(f"{100 * x:.1f} %" for x in (false, equal, covered))
    print(f"\n| {noise} | {rounds} | {shares} | {error:+.2f} | {100 * power:.1f} % |")
    assert at_most(false, STUDIES) and at_most(equal, STUDIES) and at_most(1 - covered, STUDIES)
    if noise in ("plain", "stalls"):
        assert abs(error) < 0.08 and 0.75 <= power <= 0.90


@pytest.mark.slow
@pytest.mark.parametrize("place_pct", [5.0, 11.0])
def test_error_rates_do_not_depend_on_the_size_of_the_position_effect(place_pct):
    for rounds in (3, 5, 32):
        *shares, error = rates(STUDIES, rounds, place_pct)
        *other_shares, other_error = rates(STUDIES, rounds, 8.0)
        assert shares == pytest.approx(other_shares, abs=0.003)
        assert error == pytest.approx(other_error, abs=0.02)


# ------------------------------------------------------------------ processes of their own

LIVE_SD = 0.01  # from set to set, the difference of two arms varies by 1.3 to 2.4 %
LIVE_ROUNDS, SLICES = 16, 40  # of each arm in a set


class Worker:
    """A worker without a process: it counts its rounds or slices, and logs when they were."""

    pids: tuple[int, ...] = ()

    def __init__(self, clock: list[int], slices: int | None) -> None:
        self.alive, self.clock, self.slices = True, clock, slices
        self.next_answer = "hello", VERSION
        self.positions: list[int] = []
        self.moments: list[int] = []

    def answer(self, ticker):
        return self.next_answer

    def send(self, ticker, verb, value=None):
        self.next_answer = self.react(verb, value)

    def react(self, verb, value):
        if verb in ("probe", "load"):
            return f"{verb}ed", None
        if verb == "warm_up":
            return ("slices", None) if self.slices else ("parts", [["case", LIVE_ROUNDS]])
        if verb != "turn":
            self.alive = False
            return "ended", None
        self.moments.append(len(self.clock))
        self.clock.append(0)
        if self.slices is None:
            self.positions.append(value[1])
            return "done", None
        return ("values", [0]) if len(self.moments) == self.slices else ("done", None)


def workers_of(order, slices=None):
    """Return the workers of one set after all their turns."""
    clock = []
    workers = {name: Worker(clock, slices) for name in ARMS}
    LiveSet(workers, order, None, lambda: None).run()
    return list(workers.values())


def rounds_row(seed, noise):
    """Return the row of a study whose arms have rounds."""
    logs, _ = simulate_processes(seed, LIVE_ROUNDS, 0.0, noise=noise)
    order = random.Random(seed)
    positions = np.array(
        [[worker.positions for worker in workers_of(order)] for _ in range(PROCESSES)]
    )
    logs = logs + (positions == 0) * np.log(1.08)
    logs += np.random.default_rng(seed).normal(0, LIVE_SD, (PROCESSES, len(ARMS), 1))
    return as_row(logs, positions)


def slices_row(seed, noise):
    """Return the row of a study whose arms have slices."""
    rng, order = np.random.default_rng(seed), random.Random(seed)
    logs = np.empty((PROCESSES, len(ARMS), 1))
    for process in range(PROCESSES):
        speed = machine(rng, noise, SLICES * len(ARMS)) + 0.05 * (noise == "drift") * process
        for arm, worker in enumerate(workers_of(order, SLICES)):
            own = speed[worker.moments]
            if noise == "unequal variances" and arm == 1:
                own = own + rng.normal(-0.005, 0.1, len(own))  # of the same mean time
            logs[process, arm] = np.log(np.exp(own).mean())
    logs += rng.normal(0, LIVE_SD * (1 + 3 * (noise == "arm by process")), logs.shape)
    if noise == "modes":
        logs += 0.05 * (rng.random(logs.shape) < 0.25)
    return as_row(logs, np.zeros((PROCESSES, len(ARMS), 0), int))


def machine(rng, noise, turns):
    """Return the log time that a unit of work takes in each turn of a set."""
    speed = rng.normal(0, TURN_SD, turns)
    if noise in ("t2", "t3"):
        speed = np.clip(rng.standard_t(int(noise[1]), turns) * TURN_SD / 2, -0.5, 0.5)
    if noise == "autocorrelation":
        for turn in range(1, turns):
            speed[turn] += 0.95 * speed[turn - 1]
    if noise == "drift":
        speed += 0.1 * np.linspace(0, 1, turns)
    if noise == "stalls":
        speed += (rng.random(turns) < 0.02) * rng.exponential(0.3, turns)
    return speed


def false_verdicts(row_of, studies):
    answers = (final_answer(row_of(900_000 + study)) for study in range(studies))
    return np.mean([word in {"better", "worse", "trivial"} for _, word in answers])


def test_every_worker_has_all_its_turns():
    order = random.Random(1)
    for slices, turns in ((None, LIVE_ROUNDS), (SLICES, SLICES)):
        workers = workers_of(order, slices)
        assert [len(worker.moments) for worker in workers] == [turns] * 3
        assert sorted(m for worker in workers for m in worker.moments) == [*range(3 * turns)]


def test_an_arm_that_always_comes_first_is_found_slower(monkeypatch):
    """The machine slows down within a set, and only the random order makes that noise."""
    row = partial(slices_row, noise="drift")
    assert false_verdicts(row, 40) <= 0.15
    monkeypatch.setattr(random.Random, "shuffle", lambda self, arms: arms.sort())
    own = lambda rng, noise, turns: 0.1 * (np.arange(turns) % 3 == 1)  # noqa: E731
    monkeypatch.setattr(sys.modules[__name__], "machine", own)
    assert false_verdicts(row, 40) > 0.5


@pytest.mark.parametrize("row_of", [rounds_row, slices_row])
def test_live_studies_of_nothing_seldom_find_something(row_of):
    assert false_verdicts(partial(row_of, noise="plain"), QUICK) <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize("row_of", [rounds_row, slices_row])
@pytest.mark.parametrize("noise", ["plain", "stalls", *NOISE])
def test_error_rates_of_live_studies(row_of, noise):
    """Print a line of the table in docs/statistical-methods.md (``pytest -m slow -s``)."""
    share = false_verdicts(partial(row_of, noise=noise), STUDIES)
    print(f"\n| {row_of.__name__.removesuffix('_row')} | {noise} | {100 * share:.1f} % |")
    assert share <= 0.06
