"""The verdict on one row: one word, and the reason where the word needs one.

Rules, first match wins:

1. a failed gate that touches the arm: ``invalid``, with its cause;
2. no values, or values without a logarithm: ``inconclusive``;
3. under 3 blocks of 2 runs (6 blocks of 1), alpha out of the design's reach, or nothing
   to be claimed now (blocks added after results were shown, blocks still to run, no look
   declared here): ``estimate_only``;
4. the interval lies inside the margin: ``trivial`` where the difference is significant,
   ``equivalent`` where it is not; both are withheld where the A/A control's own interval,
   that of its row alone, exceeds the margin;
5. significant (adjusted p at most alpha): ``faster`` or ``slower``;
6. else ``inconclusive``, with the smallest effect that could have been seen.

The interval is simultaneous over the rows and arms, and p is adjusted over them: a study
says a wrong ``faster``, ``slower``, ``equivalent`` or ``trivial`` anywhere in its primary
rows with a probability of at most alpha. The control's is not, for it describes the noise of a
row, which is no larger for there being others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.analysis.arm_comparison import ArmComparison, DecisionCriteria
from labkit.analysis.number_format import count_text, magnitude_text
from labkit.analysis.statistics.power import blocks_needed, min_blocks_to_claim

VERDICT_WORDS = (
    "faster",
    "slower",
    "equivalent",
    "trivial",
    "inconclusive",
    "invalid",
    "estimate_only",
)
DECIDED_WORDS = frozenset({"faster", "slower", "equivalent", "trivial"})
NOISE_EXCEEDS_MARGIN = "noise exceeds margin"


@dataclass(frozen=True)
class Verdict:
    """One of :data:`VERDICT_WORDS`; ``reason`` is None where the numbers say it all."""

    word: str
    reason: str | None = None


def exceeds_margin(control: ArmComparison | None, margin_pct: float) -> bool:
    """Tell whether the A/A control's own interval reaches beyond the margin."""
    if control is None or control.ci_raw_pct is None:
        return False
    return max(abs(limit) for limit in control.ci_raw_pct) > margin_pct


def judge(
    found: ArmComparison,
    better: str | None,
    levels: DecisionCriteria,
    causes: Sequence[str],
    control: ArmComparison | None,
) -> Verdict:
    """Judge one comparison.

    Parameters
    ----------
    better
        ``higher`` or ``lower``: which direction of the metric is faster.
    causes
        Why a failed gate forbids a verdict; empty where all hold.
    control
        The A/A control's comparison in the same row, or None where there is none.
    """
    if causes:
        return Verdict("invalid", "; ".join(causes))
    if found.effect_pct is None:
        return Verdict("inconclusive", "no complete block with values above 0")
    fewest = min_blocks_to_claim(levels.runs)
    if found.blocks < fewest:
        blocks = count_text(found.blocks, "block")
        return Verdict(
            "estimate_only", f"{blocks} of {levels.runs}: a claim needs at least {fewest}"
        )
    if levels.withheld_reason is not None:
        return Verdict("estimate_only", levels.withheld_reason)
    if found.p_adjusted is None or found.equivalence is None:
        raise ValueError(f"{found.arm}: an effect without its test")
    if found.p_floor is None or found.p_floor > levels.alpha:
        return Verdict(
            "estimate_only",
            f"{found.blocks} blocks cannot reach p = {levels.alpha:g} "
            f"(smallest: {found.p_floor:.2g})",
        )
    significant = found.p_adjusted <= levels.alpha
    if found.equivalence.p <= levels.alpha:
        if exceeds_margin(control, levels.margin_pct):
            return Verdict("inconclusive", NOISE_EXCEEDS_MARGIN)
        return Verdict("trivial" if significant else "equivalent", _bound(found))
    if significant:
        up = found.effect_pct > 0
        return Verdict("faster" if up == (better == "higher") else "slower")
    return Verdict("inconclusive", _sight(found, levels))


def _bound(found: ArmComparison) -> str | None:
    bound = found.equivalence.bound_pct if found.equivalence is not None else None
    return None if bound is None else f"any difference is within ±{bound:.2g} %"


def _sight(found: ArmComparison, levels: DecisionCriteria) -> str:
    """Say what this design could have seen, and how many blocks would see the effect seen.

    The target is the effect seen, or 1 % where that is smaller.
    """
    parts = []
    if found.p is not None and found.p <= levels.alpha:
        parts.append(
            f"p = {found.p:.2g} alone, {found.p_adjusted:.2g} adjusted over all rows and arms"
        )
    if found.mde_pct is not None and found.sd is not None and found.effect_pct is not None:
        text = f"this design sees {magnitude_text(found.mde_pct)} % at best"
        target = max(1.0, abs(round(found.effect_pct, 1)))
        need = blocks_needed(found.sd, levels.runs, found.alpha_row or levels.alpha, target)
        if need is None:
            text += f"; more than 1,000 blocks would be needed to see {target:g} %"
        elif need > found.blocks:
            text += f"; a new study of about {need} blocks would see {target:g} %"
        parts.append(text)
    return "; ".join(parts)
