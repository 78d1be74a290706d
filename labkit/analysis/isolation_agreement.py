"""Do turns in one process and separate processes say the same?

Both estimate each arm's effect on each row; their runs are independent of each other, so the
interval of the difference follows from theirs (G. Y. Zou and A. Donner, 2008, *Statistics in
Medicine* 27: the method of variance estimates recovery). The two agree where that interval
holds 0; how far apart they could be without being seen is its half width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.analysis.arm_comparison import ArmComparison
from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.host_groups import on_same_machine
from labkit.analysis.statistics.effect_size import to_log_ratio, to_percent
from labkit.records import PROCESSES_SUFFIX


@dataclass(frozen=True)
class IsolationAgreement:
    """One arm in one primary row: what each design estimates, in percent.

    ``difference_pct``: turns minus processes. ``unseen_pct``: a difference below it could
    have stayed unseen. Both are None where one of the two has no interval.
    """

    case: str
    arm: str
    turns_pct: float
    processes_pct: float
    difference_pct: float | None
    unseen_pct: float | None

    @property
    def agrees(self) -> bool | None:
        """Whether 0 is a possible difference; None where that is not known."""
        if self.difference_pct is None or self.unseen_pct is None:
            return None
        return abs(self.difference_pct) <= self.unseen_pct


def compare_isolations(turns: CellAnalysis, processes: CellAnalysis) -> list[IsolationAgreement]:
    """Compare every arm's effect in every primary row that both cells have."""
    found = []
    theirs = {row.case: i for i, row in enumerate(processes.rows) if row.primary}
    for index, row in enumerate(turns.rows):
        if not row.primary or row.skipped is not None or row.case not in theirs:
            continue
        other = processes.comparisons[theirs[row.case]]
        for arm in turns.data.treatment_arms:
            pair = turns.comparisons[index].get(arm), other.get(arm)
            agreement = _agreement(row.case, arm, *pair)
            if agreement is not None:
                found.append(agreement)
    return found


def _agreement(
    case: str, arm: str, turns: ArmComparison | None, processes: ArmComparison | None
) -> IsolationAgreement | None:
    if turns is None or processes is None:
        return None
    if turns.effect_pct is None or processes.effect_pct is None:
        return None
    one, other = to_log_ratio(turns.effect_pct), to_log_ratio(processes.effect_pct)
    unseen = None
    if turns.ci_pct is not None and processes.ci_pct is not None:
        (low, high), (other_low, other_high) = (
            (to_log_ratio(ci[0]), to_log_ratio(ci[1])) for ci in (turns.ci_pct, processes.ci_pct)
        )
        down = math.hypot(one - low, other_high - other)
        up = math.hypot(high - one, other - other_low)
        unseen = to_percent(down if one > other else up)
    return IsolationAgreement(
        case=case,
        arm=arm,
        turns_pct=turns.effect_pct,
        processes_pct=processes.effect_pct,
        difference_pct=None
        if unseen is None
        else to_percent(abs(one - other)) * _sign(one - other),
        unseen_pct=unseen,
    )


def _sign(value: float) -> int:
    return -1 if value < 0 else 1


def isolation_agreements(analysis: CellAnalysis) -> list[IsolationAgreement] | None:
    """Hold a cell of turns against the cell that confirms it, whichever this one is.

    None where there is no such pair, the other one has no runs yet, or is of another machine.
    """
    other = analysis.companion()
    if other is None or not on_same_machine(analysis, other):
        return None
    confirms = analysis.data.dir.name.endswith(PROCESSES_SUFFIX)
    return compare_isolations(other, analysis) if confirms else compare_isolations(analysis, other)


def isolation_sentence(analysis: CellAnalysis) -> str | None:
    """Say whether separate processes agree with the turns; None where none were run."""
    found = isolation_agreements(analysis)
    return None if found is None else agreement_sentence(found)


def agreement_sentence(found: Sequence[IsolationAgreement]) -> str:
    """Say in one sentence whether the two designs agree."""
    known = [a for a in found if a.unseen_pct is not None and a.difference_pct is not None]
    if not known:
        return "Separate processes: too few blocks to say whether they agree with the turns."
    apart = [a for a in known if not a.agrees]
    unseen = max(a.unseen_pct or 0.0 for a in known)
    could = f"a difference below {unseen:.1f} % could have stayed unseen in some row"
    if not apart:
        number = "the only row" if len(known) == 1 else f"all {len(known)} rows"
        return f"Separate processes agree with the turns in {number} ({could})."
    worst = max(apart, key=lambda a: abs(a.difference_pct or 0.0) / (a.unseen_pct or 1.0))
    return (
        f"Separate processes disagree with the turns in {len(apart)} of {len(known)} rows, most "
        f"in {worst.case}: {worst.arm} {worst.turns_pct:+.1f} % in turns, "
        f"{worst.processes_pct:+.1f} % in processes."
    )
