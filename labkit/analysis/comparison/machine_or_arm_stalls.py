"""Stall attribution: did the machine or an arm cause the stalls removed from the arms' times?

The arms of a request workload may be interleaved in one process. If a step then took clearly longer
than the same step of the other arms, it counts as stalled, and its excess time is removed
(``labkit.workload.requests.interleaved_serving_arms.stalled_seconds``). Work that an arm now and
then does (compaction, copies, eviction) looks like a stall within one process, but not over many:
the machine stalls any arm that happens to run, while an arm's own work recurs in that arm. So the
removed share of an arm's time, and the number of its stalled steps, are compared with the
baseline's in the same process by the exact signed-rank test over processes (F. Wilcoxon 1945).
Because the test uses ranks, one huge stall cannot decide it. The rules are:

- if p, multiplied by the number of arms, is at most .005 for some arm, or if there are too few
  processes for any test, every arm is judged by its times as measured, with stalls. Where the
  processes are too few for .005, the limit is their smallest p, up to .01;
- if p is at most .05 for an arm, or if the processes are too few for .01, too, stalls stay
  excluded, and that arm is called better or worse, on times that the exclusion changed, only if it
  is so with stalls, too;
- if stalls are excluded, an arm is called equivalent only if its p is above .05 and the difference
  between its stalls and the baseline's lies inside the margin (80 % interval of the same test),
  because that much could be the arm's own work.

If the stalls of an arm that was measured are not known, as those of a server, the times of all arms
are left as measured: else some would be without stalls, and some with them. An arm is compared over
the processes that it shares with the baseline: one that ran out of memory, or that a look dropped,
takes none from the others.

In simulations (``tests/analysis/comparison/test_machine_or_arm_stalls.py``), p is at most .05 in at
most 6 % of A/A studies. If an arm's own work looks like stalls and takes 3 % or more of its time,
it goes unnoticed in at most 3 % of studies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from labkit.analysis.comparison.observations import MEASURED_OUTCOMES
from labkit.analysis.comparison.verdict import DECIDED_WORDS, Verdict
from labkit.analysis.number_format import bound_text, p_text
from labkit.analysis.statistics.hodges_lehmann import to_percent
from labkit.analysis.statistics.permutation_test import (
    Floats,
    pool_by_block,
    relabellings,
    smallest_p,
    two_sided_p,
)
from labkit.records import Arm, CaseRecord, Record

OWN_WORK_ALPHA, COARSE_OWN_WORK_ALPHA, UNCLEAR_ALPHA = 0.005, 0.01, 0.05
Z_80 = 1.2816  # normal quantile for a two-sided 80 % interval
WITHIN_MARGIN = ("equivalent", "trivial")


@dataclass(frozen=True)
class StallAttribution:
    """The share of each arm's time lost to stalls, and what follows for the verdicts.

    The mappings are by arm. ``stalled_pct`` is the percentage of an arm's time that stalls took
    (mean over processes). ``own_work_bounds_pct`` is an upper bound on the arm's own work among the
    excluded stalls, in percent of its time; it is infinite for an arm that stalls more or less than
    the baseline. ``unclear_reasons`` has the reason for each arm that is better or worse only if
    it is so with stalls, in rows whose times changed when they were excluded.
    ``kept_reason`` says why stalls were left in all times. It is None if they were excluded.
    """

    stalled_pct: Mapping[str, float]
    own_work_bounds_pct: Mapping[str, float] = field(default_factory=dict)
    unclear_reasons: Mapping[str, str] = field(default_factory=dict)
    kept_reason: str | None = None

    @property
    def shares(self) -> str:
        return ", ".join(f"{pct:.1f} % of {arm}'s" for arm, pct in self.stalled_pct.items())

    def caveats(self) -> Iterator[str]:
        """Yield caveats; there are none if stalls are excluded and every arm gets a verdict."""
        stalls = f"apparent stalls of the machine ({self.shares} time)"
        if self.kept_reason is not None:
            yield f"{stalls} were left in the times: {self.kept_reason}"
        for arm, reason in self.unclear_reasons.items():
            yield (
                f"{stalls} were excluded, and {arm} is better or worse only if it is so with "
                f"them, too: {reason}"
            )

    def restrict(
        self, verdict: Verdict, arm: str, margin_pct: float, with_stalls: Callable[[], Verdict]
    ) -> Verdict:
        """Return ``verdict``, or ``inconclusive`` if excluded stalls may be the arm's own work.

        Call it only for rows whose times changed when stalls were excluded. ``with_stalls`` returns
        the verdict on the times with stalls: if both are ``better``, or both ``worse``, it does
        not matter whose work the stalls were.
        """
        if self.kept_reason is not None or verdict.word not in DECIDED_WORDS:
            return verdict
        bound = self.own_work_bounds_pct.get(arm, 0.0)
        if verdict.word not in WITHIN_MARGIN:
            if arm not in self.unclear_reasons or with_stalls().word == verdict.word:
                return verdict
            return Verdict("inconclusive", self.unclear_reasons[arm])
        if math.isinf(bound):
            return Verdict("inconclusive", self.unclear_reasons[arm])
        if bound > margin_pct:
            own = f"up to {bound_text(bound)} % may be the arm's own work"
            return Verdict("inconclusive", f"stalls were excluded, but {own}")
        return verdict


def attribute_stalls(records: Sequence[Record], arms: Sequence[Arm]) -> StallAttribution | None:
    """Return the attribution of stalls to the machine or an arm, or None if there were no stalls.

    ``arms``: the baseline first. The control runs the baseline's code and is not tested.
    """
    stalled = _stalled_by_arm(records, arms)
    if not any(any(process) for each in stalled.values() for process in each.values()):
        return None
    pct = {name: 100 * fmean(share for share, _ in each.values()) for name, each in stalled.items()}
    measured = {record.arm for record in records if record.outcome in MEASURED_OUTCOMES}
    unknown = [arm.name for arm in arms if arm.name in measured and arm.name not in stalled]
    if unknown:
        return StallAttribution(pct, kept_reason=f"those of {', '.join(unknown)} are not known")
    base, *others = (arm.name for arm in arms if arm.role != "control")
    if base not in stalled:  # it was not measured, so no arm is compared
        return None
    tested = [name for name in others if name in stalled]
    pairs: dict[str, tuple[Floats, Floats]] = {}  # stalls in both arms' processes, [processes, 2]
    for name in tested:
        blocks = sorted(stalled[base].keys() & stalled[name].keys())
        both = [np.array([stalled[arm][b] for b in blocks]) for arm in (base, name)]
        pairs[name] = both[0], both[1]
    fewest = min((len(pair[0]) for pair in pairs.values()), default=len(stalled[base]))
    if smallest_p(fewest, 1) > UNCLEAR_ALPHA:
        reason = "with so few processes, stalls cannot be told from an arm's own work"
        return StallAttribution(pct, kept_reason=reason)
    p = {name: signed_rank_p(*pair) for name, pair in pairs.items()}
    limits = {name: own_work_limit(len(pair[0]), len(tested)) for name, pair in pairs.items()}
    reasons = {
        name: reason
        for name in tested
        for reason in [_unclear_reason(name, base, p[name], len(pairs[name][0]), limits[name])]
        if reason is not None
    }
    own = [reasons[name] for name in tested if p[name] * len(tested) <= limits[name]]
    if own:
        return StallAttribution(pct, kept_reason="; ".join(own))
    bounds = {
        name: math.inf if p[name] <= UNCLEAR_ALPHA else own_work_bound_pct(*(s[:, 0] for s in pair))
        for name, pair in pairs.items()
    }
    return StallAttribution(pct, bounds, reasons)


def own_work_limit(processes: int, arms: int) -> float:
    """Return the largest p, multiplied by the number of arms, that shows an arm's own work.

    0 if p cannot become so small that few studies of equal arms would show it.
    """
    smallest = smallest_p(processes, 1) * arms
    return max(OWN_WORK_ALPHA, smallest) if smallest <= COARSE_OWN_WORK_ALPHA else 0.0


def _unclear_reason(arm: str, base: str, p: float, processes: int, limit: float) -> str | None:
    """Return why the stalls of an arm may be its own work, or None if they seem the machine's."""
    if p <= UNCLEAR_ALPHA:
        return (
            f"the stalls of {arm} may differ from those of {base} (p = {p_text(p)}, the smaller "
            "of two tests, not adjusted) and may be the arm's own work"
        )
    if limit:
        return None
    return f"{processes} processes are too few to tell the stalls of {arm} from its own work"


def as_measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records with their times as measured, stalls included.

    So is the number of requests within the limits. The times of single requests stay without
    stalls: they were recorded in no other way.
    """
    return tuple(replace(r, cases=tuple(map(_as_measured, r.cases))) for r in records)


def _as_measured(case: CaseRecord) -> CaseRecord:
    times, notes = case.known_notes.get("as_measured", {}), case.notes
    metrics = tuple(
        replace(m, repeats=tuple(np.atleast_1d(times[m.name]).tolist())) if m.name in times else m
        for m in case.metrics
    )
    traffic = case.known_notes.get("traffic", {})
    if times and "good" in traffic:
        values = {metric.name: metric.repeats[0] for metric in metrics}
        good = round(values["goodput_req_s"] * values["wall_s"])
        notes = {**notes, "traffic": {**traffic, "good": good}}
    return replace(case, metrics=metrics, notes=notes)


def _stalled_by_arm(
    records: Sequence[Record], arms: Sequence[Arm]
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return by arm and block the share of time lost to stalls, and stalled steps, if recorded."""
    stalled: dict[str, dict[int, tuple[float, float]]] = {}
    for record in records:
        noted = record.known_notes.get("stalls", {})
        if "of_s" in noted:
            share = noted["seconds"] / noted["of_s"] if noted["of_s"] else 0.0
            stalled.setdefault(record.arm, {})[record.block] = share, float(noted["steps"])
    return {arm.name: stalled[arm.name] for arm in arms if arm.name in stalled}


def signed_rank_p(base: Floats, arm: Floats) -> float:
    """Return the smaller p of two signed-rank tests, of the stalled shares and the stalled steps.

    ``base`` and ``arm`` are float64 [processes, 2]; the columns are share and steps.
    """
    ranks = np.stack([np.sign(d) * _ranks(np.abs(d)) for d in (arm - base).T], axis=1)[:, None]
    labels = relabellings(len(ranks), 1)
    sums = labels.mean_differences(pool_by_block(np.zeros_like(ranks), ranks))
    return min(map(two_sided_p, sums.T))


def _ranks(values: Floats) -> Floats:
    """Rank values from 1, float64 [n]; ties share their mean rank."""
    ordered = np.sort(values)
    below, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + upto + 1) / 2


def own_work_bound_pct(base: Floats, arm: Floats) -> float:
    """Return the largest percentage by which stalls may have slowed one arm more than the other.

    The percentage comes from the 80 % interval of the signed-rank test: it is the absolute value of
    the limit further from 0. The limits are order statistics of the Walsh averages of the
    differences in log time. The test's normal approximation determines which ones. ``base``,
    ``arm``: shares of the arms' time, float64 [processes].
    """
    slower = np.log1p(-base) - np.log1p(-arm)
    n = len(slower)
    first, second = np.triu_indices(n)
    averages = np.sort((slower[first] + slower[second]) / 2)
    trim = max(0, int(n * (n + 1) / 4 - Z_80 * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    return max(abs(to_percent(limit)) for limit in (averages[trim], averages[-1 - trim]))
