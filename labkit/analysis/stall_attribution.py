"""Whether what was taken out of arms' times as the machine's stalls was the machine's.

Where request arms take turns, a step that took clearly longer than the same step of the
others has the rest taken out (:mod:`labkit.workload.noise_spikes`). What an arm itself does now and
then (it compacts, copies, evicts) looks the same in one process. In many it does not: a
machine stalls in anybody's turn, an arm's own work comes back in its own. So what each arm
lost is held against what the baseline lost in the same process, its share of the arm's time
and its steps, by the exact signed-rank test over processes (F. Wilcoxon 1945), in which one
large stall weighs no more than the largest of several:

- p <= .005 for some arm, times their number, or too few processes for any test: every arm is
  judged by its times as they were measured, stalls and all;
- p <= .05: stalls stay out, and the arm gets no word for times that they changed;
- else they stay out, and an arm is called equivalent only where what it lost more or less than
  the baseline is inside the margin, too (the 80 % interval of the same test): so much could
  be its own.

Simulated (``tests/analysis/test_own_work.py``): A/A studies have p <= .05 in at most 6 %; work of
an arm's own that takes 3 % or more of its time and looks like stalls passes for nothing in
at most 3 %.
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

OWN, UNCLEAR = 0.005, 0.05
Z = 1.2816  # of an 80 % interval
WITHIN = ("equivalent", "trivial")


@dataclass(frozen=True)
class StallAttribution:
    """What was taken out of each arm's time, and what follows for the verdicts.

    ``pct``: the mean over processes, percent. ``bounds``: how much more or less than the
    baseline an arm may have lost, percent of its time. ``unclear``: why an arm gets no word
    for times without stalls. ``own``: why all times are as measured; None where they are not.
    """

    pct: Mapping[str, float]
    bounds: Mapping[str, float] = field(default_factory=dict)
    unclear: Mapping[str, str] = field(default_factory=dict)
    own: str | None = None

    @property
    def shares(self) -> str:
        """Say what was taken out of whom."""
        return ", ".join(f"{pct:.1f} % of {arm}'s" for arm, pct in self.pct.items())

    def caveats(self) -> Iterator[str]:
        """Say what a reader must know; nothing where stalls are out and words are given."""
        what = f"what looks like the machine's stalls ({self.shares} time)"
        if self.own is not None:
            yield f"{what} was left in: {self.own}"
        for arm, why in self.unclear.items():
            yield f"{what} was taken out, and no word given for {arm}: {why}"

    def limit(self, verdict: Verdict, arm: str, margin_pct: float) -> Verdict:
        """Return the verdict on times that stalls changed, or why there is none."""
        if self.own is not None or verdict.word not in DECIDED_WORDS:
            return verdict
        if arm in self.unclear:
            return Verdict("inconclusive", f"stalls: {self.unclear[arm]}")
        bound = self.bounds.get(arm, 0.0)
        if verdict.word in WITHIN and bound > margin_pct:
            reason = f"up to {bound:.2g} % that was taken out as stalls may be its own work"
            return Verdict("inconclusive", reason)
        return verdict


def attribute_stalls(records: Sequence[Record], arms: Sequence[Arm]) -> StallAttribution | None:
    """Find what was taken out of arms that took turns; None where nothing was.

    Parameters
    ----------
    arms
        The baseline first. The control can have no work of its own and is not tested.
    """
    blocks = _complete(records, arms)
    lost = {arm.name: np.array([_lost(block[arm.name]) for block in blocks]) for arm in arms}
    if not any(each.any() for each in lost.values()):
        return None
    pct = {name: float(100 * each[:, 0].mean()) for name, each in lost.items()}
    base, *asked = (arm.name for arm in arms if arm.role != "control")
    if min_p(len(blocks), 1) > UNCLEAR:
        return StallAttribution(pct, own="so few processes cannot tell it from an arm's own work")
    p = {name: p_of(lost[base], lost[name]) for name in asked}
    why = {
        name: f"{name} differs from {base} in it (p = {p_text(p[name])}), so it may be its own work"
        for name in asked
        if p[name] <= UNCLEAR
    }
    own = [reason for name, reason in why.items() if p[name] * len(asked) <= OWN]
    if own:
        return StallAttribution(pct, own="; ".join(own))
    bounds = {name: bound_pct(lost[base][:, 0], lost[name][:, 0]) for name in asked}
    return StallAttribution(pct, bounds, why)


def as_measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return records with all times as they were measured."""
    return tuple(replace(r, cases=tuple(map(_as_measured, r.cases))) for r in records)


def _as_measured(case: CaseRecord) -> CaseRecord:
    times = case.notes.get("as_measured", {})
    metrics = (
        replace(m, repeats=(float(times[m.name]),)) if m.name in times else m for m in case.metrics
    )
    return replace(case, metrics=tuple(metrics))


def _complete(records: Sequence[Record], arms: Sequence[Arm]) -> list[dict[str, Record]]:
    """Return the processes in which every arm has noted its stalls, the arms by name."""
    blocks: dict[int, dict[str, Record]] = {}
    for record in records:
        if "of_s" in record.notes.get("stalls", {}):
            blocks.setdefault(record.block, {})[record.arm] = record
    return [blocks[block] for block in sorted(blocks) if len(blocks[block]) == len(arms)]


def _lost(record: Record) -> tuple[float, float]:
    """Return the share of a run's time that was taken out, and from how many steps."""
    noted = record.notes["stalls"]
    return noted["seconds"] / noted["of_s"] if noted["of_s"] else 0.0, float(noted["steps"])


def p_of(base: Floats, arm: Floats) -> float:
    """Return the smaller two-sided p of share and steps, both arms float64 [processes, 2]."""
    ranks = [np.sign(d) * _ranks(np.abs(d)) for d in (arm - base).T]
    return min(permutation_test(np.zeros((len(r), 1)), r[:, None]) for r in ranks)


def _ranks(values: Floats) -> Floats:
    """Rank values from 1, float64 [n]; equal ones share the mean of theirs."""
    ordered = np.sort(values)
    below, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + upto + 1) / 2


def bound_pct(base: Floats, arm: Floats) -> float:
    """Return how much slower stalls made one arm than the other at most, percent.

    The larger limit of the signed-rank test's interval: Walsh averages of the differences,
    counted off by the normal approximation of its distribution.

    Parameters
    ----------
    base, arm
        Shares of the arms' time, float64 [processes].
    """
    slower = np.log1p(-base) - np.log1p(-arm)
    n = len(slower)
    first, second = np.triu_indices(n)
    averages = np.sort((slower[first] + slower[second]) / 2)
    off = max(0, int(n * (n + 1) / 4 - Z * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    return max(abs(to_percent(limit)) for limit in (averages[off], averages[-1 - off]))
