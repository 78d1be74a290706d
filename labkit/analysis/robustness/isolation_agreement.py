"""Isolation agreement: do interleaved arms and separate processes give the same effects?

Both designs estimate each arm's effect in each row, from independent runs. So the interval of the
difference between the designs follows from the two intervals of the effect, by the method of
variance estimates recovery (G. Y. Zou and A. Donner, 2008, *Statistics in Medicine* 27). The
designs agree in a row if the interval of the difference contains 0. Half of its width is the
largest difference that could have gone undetected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.model.result_row import Comparison, row_name
from labkit.analysis.number_format import bound_text, percent_text
from labkit.analysis.robustness.cells_by_host import on_same_machine
from labkit.analysis.statistics.hodges_lehmann import to_log_ratio, to_percent
from labkit.records import PROCESSES_SUFFIX


@dataclass(frozen=True)
class IsolationAgreement:
    """The effects of one arm in one primary row under both designs, in percent.

    ``row`` is the row's name. ``difference_pct`` is interleaved minus separate; a difference below
    ``undetected_pct`` could have gone undetected. Both are None if a design has no interval.
    """

    row: str
    arm: str
    interleaved_pct: float
    separate_pct: float
    difference_pct: float | None
    undetected_pct: float | None

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the difference contains 0; None if unknown."""
        if self.difference_pct is None or self.undetected_pct is None:
            return None
        return abs(self.difference_pct) <= self.undetected_pct


def _compare_isolations(
    interleaved: CellAnalysis, separate: CellAnalysis
) -> list[IsolationAgreement]:
    """Compare each treatment arm's effect in each primary row that both cells measured."""
    agreements = []
    metrics = {row.metric for row in interleaved.rows if row.primary}
    theirs = {(r.case, r.metric): i for i, r in enumerate(separate.rows) if r.primary}
    for index, row in enumerate(interleaved.rows):
        key = row.case, row.metric
        if not row.primary or row.skipped is not None or key not in theirs:
            continue
        other = separate.comparisons[theirs[key]]
        for arm in interleaved.data.treatment_arms:
            pair = interleaved.comparisons[index].get(arm), other.get(arm)
            agreement = compare_effects(row_name(row, metrics), arm, *pair)
            if agreement is not None:
                agreements.append(agreement)
    return agreements


def compare_effects(
    row: str, arm: str, interleaved: Comparison | None, separate: Comparison | None
) -> IsolationAgreement | None:
    """Compare an arm's effects under two designs; None if one of them has no log ratio.

    It has none without an effect, or where a goodput of 0 makes the effect or a limit -100 %.
    """
    if interleaved is None or interleaved.effect_pct is None:
        return None
    if separate is None or separate.effect_pct is None:
        return None
    if min(*interleaved.known_pct, *separate.known_pct) <= -100:
        return None
    one, other = to_log_ratio(interleaved.effect_pct), to_log_ratio(separate.effect_pct)
    undetected = difference = None
    if interleaved.ci_pct is not None and separate.ci_pct is not None:
        (low, high), (other_low, other_high) = (
            (to_log_ratio(ci[0]), to_log_ratio(ci[1]))
            for ci in (interleaved.ci_pct, separate.ci_pct)
        )
        down = math.hypot(one - low, other_high - other)
        up = math.hypot(high - one, other - other_low)
        undetected = to_percent(down if one > other else up)
        difference = math.copysign(to_percent(abs(one - other)), one - other)
    effects = interleaved.effect_pct, separate.effect_pct
    return IsolationAgreement(row, arm, *effects, difference, undetected)


def isolation_agreements(analysis: CellAnalysis) -> list[IsolationAgreement] | None:
    """Compare a cell with its companion: one interleaves arms, the other has separate processes.

    Return None if there is no companion, or if the companion has no runs yet or ran on another
    machine.
    """
    other = analysis.companion()
    if other is None or not on_same_machine(analysis, other):
        return None
    confirms = analysis.data.dir.name.endswith(PROCESSES_SUFFIX)
    return _compare_isolations(*((other, analysis) if confirms else (analysis, other)))


def isolation_sentence(analysis: CellAnalysis) -> str | None:
    """Return a sentence on whether both designs agree, or None if they cannot be compared."""
    agreements = isolation_agreements(analysis)
    if agreements is None:
        return None
    if not agreements:
        return (
            "Separate processes: no effect can be compared with that of interleaved runs (one is "
            "unknown, or reaches -100 %)."
        )
    known = [a for a in agreements if a.undetected_pct is not None and a.difference_pct is not None]
    if not known:
        return (
            "Separate processes: too few blocks to tell whether they agree with interleaved runs."
        )
    noun = "row" if len({a.arm for a in known}) == 1 else "comparison"
    apart = [a for a in known if not a.agrees]
    undetected = max(a.undetected_pct or 0.0 for a in known)
    could = f"a difference below {bound_text(undetected)} % could have gone undetected in some row"
    if not apart:
        number = f"the only {noun}" if len(known) == 1 else f"all {len(known)} {noun}s"
        return f"Separate processes agree with interleaved runs in {number} ({could})."
    worst = max(apart, key=lambda a: abs(a.difference_pct or 0.0) / (a.undetected_pct or 1.0))
    return (
        f"Separate processes disagree with interleaved runs in {len(apart)} of {len(known)} "
        f"{noun}s, most in {worst.row}: {worst.arm} {percent_text(worst.interleaved_pct)} "
        f"interleaved, {percent_text(worst.separate_pct)} in separate processes."
    )
