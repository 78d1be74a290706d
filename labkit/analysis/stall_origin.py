"""Stall attribution: were the stalls removed from interleaved arms' times the machine's?

Where request arms are interleaved in one process, the excess of a step that took clearly
longer than the same step of the other arms is removed (:mod:`labkit.workload.stall_times`).
Work that an arm itself does now and then (compaction, copies, eviction) looks the same in one
process, but not in many: the machine stalls whichever arm is running, while an arm's own work
returns in that arm. So the removed share of an arm's time, and its number of steps, are compared
with the baseline's in the same process by the exact signed-rank test over processes
(F. Wilcoxon 1945), in which one large stall weighs no more than the largest of several:

- p <= .005 for some arm, times the number of arms, or too few processes for any test: every arm
  is judged by its times as measured, with stalls;
- p <= .05: stalls stay excluded, and the arm gets no verdict on times that they changed;
- else stalls stay excluded, and an arm is called equivalent only if the difference between its
  stalls and the baseline's also lies inside the margin (80 % interval of the same test), because
  that much could be its own work.

Simulated (``tests/analysis/test_stall_origin.py``): p <= .05 in at most 6 % of A/A studies;
an arm's own work of 3 % or more of its time that looks like stalls goes unnoticed in at most
3 % of studies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from labkit.analysis.number_format import p_text
from labkit.analysis.statistics.effect_size import to_percent
from labkit.analysis.statistics.permutation_test import Floats, min_p, permutation_test
from labkit.analysis.verdict import DECIDED_WORDS, Verdict
from labkit.records import Arm, CaseRecord, Record

OWN_WORK_ALPHA, UNCLEAR_ALPHA = 0.005, 0.05
Z_80 = 1.2816  # normal quantile of a two-sided 80 % interval
WITHIN_MARGIN = ("equivalent", "trivial")


@dataclass(frozen=True)
class StallAttribution:
    """The share of each arm's time that stalls took, and its effect on the verdicts.

    ``stalled_pct`` is the mean over processes, percent. ``own_work_bounds_pct`` bounds how much
    of that may be the arm's own work, percent of its time. ``unclear_reasons`` says why an arm
    gets no verdict on times without stalls. ``kept_reason`` says why all times are as measured,
    with stalls; it is None if stalls are excluded.
    """

    stalled_pct: Mapping[str, float]
    own_work_bounds_pct: Mapping[str, float] = field(default_factory=dict)
    unclear_reasons: Mapping[str, str] = field(default_factory=dict)
    kept_reason: str | None = None

    @property
    def shares(self) -> str:
        """The stalled share of each arm's time as text."""
        return ", ".join(f"{pct:.1f} % of {arm}'s" for arm, pct in self.stalled_pct.items())

    def caveats(self) -> Iterator[str]:
        """Yield caveats; there are none if stalls are excluded and every arm gets a verdict."""
        stalls = f"apparent stalls of the machine ({self.shares} time)"
        if self.kept_reason is not None:
            yield f"{stalls} were left in the times: {self.kept_reason}"
        for arm, reason in self.unclear_reasons.items():
            yield f"{stalls} were excluded, and {arm} gets no verdict: {reason}"

    def restrict(self, verdict: Verdict, arm: str, margin_pct: float) -> Verdict:
        """Return the verdict on times that stalls changed, or ``inconclusive`` with the reason."""
        if self.kept_reason is not None or verdict.word not in DECIDED_WORDS:
            return verdict
        if arm in self.unclear_reasons:
            return Verdict("inconclusive", f"stalls: {self.unclear_reasons[arm]}")
        bound = self.own_work_bounds_pct.get(arm, 0.0)
        if verdict.word in WITHIN_MARGIN and bound > margin_pct:
            reason = f"up to {bound:.2g} % excluded as stalls may be the arm's own work"
            return Verdict("inconclusive", reason)
        return verdict


def attribute_stalls(records: Sequence[Record], arms: Sequence[Arm]) -> StallAttribution | None:
    """Return the stalls of interleaved arms, or None if there were none.

    Parameters
    ----------
    arms
        The baseline first. The control runs the baseline's code and is not tested.
    """
    blocks = _complete(records, arms)
    stalled = {arm.name: np.array([_stalled(block[arm.name]) for block in blocks]) for arm in arms}
    if not any(each.any() for each in stalled.values()):
        return None
    pct = {name: float(100 * each[:, 0].mean()) for name, each in stalled.items()}
    base, *tested = (arm.name for arm in arms if arm.role != "control")
    if min_p(len(blocks), 1) > UNCLEAR_ALPHA:
        return StallAttribution(
            pct, kept_reason="so few processes cannot tell them from an arm's own work"
        )
    p = {name: signed_rank_p(stalled[base], stalled[name]) for name in tested}
    reasons = {
        name: f"{name} differs from {base} in them (p = {p_text(p[name])}), "
        "so they may be its own work"
        for name in tested
        if p[name] <= UNCLEAR_ALPHA
    }
    own = [reason for name, reason in reasons.items() if p[name] * len(tested) <= OWN_WORK_ALPHA]
    if own:
        return StallAttribution(pct, kept_reason="; ".join(own))
    bounds = {name: own_work_bound_pct(stalled[base][:, 0], stalled[name][:, 0]) for name in tested}
    return StallAttribution(pct, bounds, reasons)


def as_measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records with their times as measured, stalls included."""
    return tuple(replace(r, cases=tuple(map(_as_measured, r.cases))) for r in records)


def _as_measured(case: CaseRecord) -> CaseRecord:
    times = case.notes.get("as_measured", {})
    metrics = (
        replace(m, repeats=(float(times[m.name]),)) if m.name in times else m for m in case.metrics
    )
    return replace(case, metrics=tuple(metrics))


def _complete(records: Sequence[Record], arms: Sequence[Arm]) -> list[dict[str, Record]]:
    """Return the processes whose arms all recorded their stalls: for each, its records by arm."""
    blocks: dict[int, dict[str, Record]] = {}
    for record in records:
        if "of_s" in record.notes.get("stalls", {}):
            blocks.setdefault(record.block, {})[record.arm] = record
    return [blocks[block] for block in sorted(blocks) if len(blocks[block]) == len(arms)]


def _stalled(record: Record) -> tuple[float, float]:
    """Return the share of a run's time that stalls took, and the number of stalled steps."""
    noted = record.notes["stalls"]
    return noted["seconds"] / noted["of_s"] if noted["of_s"] else 0.0, float(noted["steps"])


def signed_rank_p(base: Floats, arm: Floats) -> float:
    """Return the smaller two-sided p of share and steps; arms are float64 [processes, 2]."""
    ranks = [np.sign(d) * _ranks(np.abs(d)) for d in (arm - base).T]
    return min(permutation_test(np.zeros((len(r), 1)), r[:, None]) for r in ranks)


def _ranks(values: Floats) -> Floats:
    """Rank values from 1, float64 [n]; ties share their mean rank."""
    ordered = np.sort(values)
    below, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + upto + 1) / 2


def own_work_bound_pct(base: Floats, arm: Floats) -> float:
    """Return the largest percentage by which stalls may have slowed one arm more than the other.

    It is the larger limit of the signed-rank test's 80 % interval: Walsh averages of the
    differences, trimmed by the normal approximation of the test's distribution.

    Parameters
    ----------
    base, arm
        Shares of the arms' time, float64 [processes].
    """
    slower = np.log1p(-base) - np.log1p(-arm)
    n = len(slower)
    first, second = np.triu_indices(n)
    averages = np.sort((slower[first] + slower[second]) / 2)
    trim = max(0, int(n * (n + 1) / 4 - Z_80 * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    return max(abs(to_percent(limit)) for limit in (averages[trim], averages[-1 - trim]))
