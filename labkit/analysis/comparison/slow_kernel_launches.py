"""Slow launches: does an arm that is faster in most rounds lose it in a few?

The arms of a kernel are compared by a typical launch: the middle of the rounds' ratios, which a
few slow rounds do not move. So an arm whose launches are now and then slow by its own work looks
faster than it is on average. The machine slows whichever arm is running, an arm's own work only
that arm. A launch is slow if it took over 1.3 times as long, relative to the typical launch of its
arm, as the other arm's launch in the same round. Processes with fewer than three rounds have no
typical launch and are left out. Whether the slow launches of an arm differ from the baseline's is
tested by the exact signed-rank test over processes, of the share of the time that they took and of
their number. The smaller p counts; it is not adjusted, because that would weaken the guard. (A test
of the number over all rounds would take a machine that now and then slows one arm for a while for
an arm's own work.)

If p is at most .05, the arm gets only a verdict that it has by the mean of all launches, too.
Otherwise it is called better or worse only if its mean does not lie on the other side.

Simulated in ``tests/analysis/comparison/test_slow_kernel_launches.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.analysis.comparison.machine_or_arm_stalls import WITHIN_MARGIN, signed_rank_p
from labkit.analysis.comparison.observations import MIN_ROUNDS, MetricRow
from labkit.analysis.comparison.verdict import DECIDED_WORDS, Verdict
from labkit.analysis.number_format import p_text, percent_text
from labkit.analysis.statistics.permutation_test import Floats
from labkit.records import Record

SLOW_RATIO = 1.3
UNCLEAR_ALPHA = 0.05


def timing_cause(arm: str, baseline: str, records: Sequence[Record]) -> str | None:
    """Return the reason why two arms' launches were timed differently, or None.

    Each revision of labkit times launches in its own way: all of them, or the fastest of a few.
    """
    ways: dict[str, dict[str, object]] = {arm: {}, baseline: {}}
    for record in records:
        for case in record.cases if record.arm in ways else ():
            if "fastest_of" in case.notes:
                ways[record.arm][case.case] = case.notes["fastest_of"]
    for case_name, way in ways[arm].items():
        base = ways[baseline].get(case_name, way)
        if base != way:
            return (
                f"launches were timed differently: the fastest of {way} in {arm}, of {base} in "
                f"{baseline} ({case_name})"
            )
    return None


def slow_launch_p(row: MetricRow, baseline: str, arm: str, blocks: Sequence[int]) -> float:
    """Return the p of "an arm's launches are slow as often, and by as much, as the baseline's".

    It is the smaller of two, not adjusted; 1 if no block has enough rounds.
    """
    pairs = (np.stack([row.rounds(b)[baseline], row.rounds(b)[arm]]) for b in blocks)
    slow = [_lost(logs) for logs in pairs if logs.shape[1] >= MIN_ROUNDS]
    if not slow:
        return 1.0
    lost = np.stack(slow)
    return signed_rank_p(lost[:, 0], lost[:, 1])


def _lost(logs: Floats) -> Floats:
    """Return slow launches' share of the time and number, [arm, 2]; logs: float64 [2, rounds]."""
    relative = logs - np.median(logs, axis=1, keepdims=True)
    excess = relative - relative[::-1]
    slow, times = excess > np.log(SLOW_RATIO), np.exp(logs)
    lost = (times * -np.expm1(-excess) * slow).sum(axis=1) / times.sum(axis=1)
    return np.stack([lost, slow.sum(axis=1)], axis=1)


def restrict(
    verdict: Verdict,
    arm: str,
    p: float,
    effects_pct: tuple[float, float],
    by_mean: Callable[[], Verdict],
    effect: str = "difference",
) -> Verdict:
    """Return ``verdict``, or ``inconclusive`` if slow launches contradict it.

    ``p``: of :func:`slow_launch_p`. ``effects_pct``: the difference of a typical launch, and that
    of the mean of all launches. ``by_mean``: returns the verdict by the mean of all launches.
    ``effect``: what is judged, in words.
    """
    if verdict.word not in DECIDED_WORDS:
        return verdict
    typical_pct, mean_pct = effects_pct
    within = verdict.word in WITHIN_MARGIN
    if p <= UNCLEAR_ALPHA:
        if by_mean().word in (WITHIN_MARGIN if within else (verdict.word,)):
            return verdict
        return Verdict(
            "inconclusive",
            f"slow launches of {arm} may differ from the baseline's (p = {p_text(p)}, the "
            "smaller of two tests of this row, not adjusted), and by the mean of all launches the "
            f"{effect} is {percent_text(mean_pct)}",
        )
    if not within and typical_pct * mean_pct < 0:
        return Verdict(
            "inconclusive",
            f"the {effect} of a typical launch is {percent_text(typical_pct)}, but by the mean of "
            f"all launches it is {percent_text(mean_pct)}",
        )
    return verdict
