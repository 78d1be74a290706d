"""The verdict on one row: one word, and a reason if the word needs one.

The first rule that applies decides:

1. ``invalid``, with the cause: a failed gate affects the arm, or it was measured unlike the
   baseline: in another unit or other rounds, its tokens counted or its launches timed by other
   means;
2. ``computed``: the values follow from sizes and counts, so there is no noise to test;
3. ``inconclusive``: no block is complete, or a value is not above 0 (unless 0 is a result of the
   metric);
4. ``estimate_only``: there are fewer than 3 blocks of 2 runs (6 blocks of 1), the design cannot
   reach alpha, or nothing may be claimed yet (blocks were added after results were shown,
   blocks are still to run, or no interim look was declared at this number of blocks);
5. the interval lies inside the margin: ``trivial`` if the difference is significant, else
   ``equivalent``. The verdict is ``inconclusive`` instead if the A/A control's unadjusted
   interval in the same row exceeds the margin, or if ``trivial`` would claim a direction (as in
   rule 6) that the interval contradicts. Where the baseline is 0 in every run, a margin in
   percent does not exist, and these words are not given;
6. ``better`` or ``worse``: the adjusted p is at most alpha. ``inconclusive`` instead if a typical
   run differs in one direction and the mean of all runs, which the interval is about, in the other;
7. ``inconclusive``, with the smallest detectable effect.

Interval and p are simultaneous over the rows and arms: the probability that a study claims a
wrong ``better``, ``worse``, ``equivalent`` or ``trivial`` anywhere in its primary rows is at
most alpha. The control's interval is not simultaneous, because it describes the noise of one row,
which does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.analysis.comparison.arm_comparison import DecisionCriteria
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.number_format import bound_text, magnitude_text
from labkit.analysis.statistics.power import (
    alpha_share,
    blocks_needed,
    degrees_of_freedom,
    min_blocks_to_claim,
)
from labkit.config import count_text

EFFECTS = frozenset({"better", "worse", "trivial"})  # the words that claim a difference
DECIDED_WORDS = EFFECTS | {"equivalent"}
NOISE_EXCEEDS_MARGIN = "noise exceeds margin"
DIRECTIONS_DIFFER = (
    "a typical run differs in one direction, and the mean of all runs in the other: a few runs "
    "differ by much"
)
IF_NO_DRIFT = "if nothing drifted between the arms' runs"  # of imported runs in sequence


@dataclass(frozen=True)
class Verdict:
    """A verdict: a word of the rules above, and the reason for it if the word needs one."""

    word: str
    reason: str | None = None

    def because(self, more: str) -> Verdict:
        """Return the verdict with a further reason."""
        return Verdict(self.word, "; ".join(filter(None, (self.reason, more))))


def too_few_blocks(blocks: int, runs: int) -> str | None:
    """Return the reason why so few blocks support no claim, or None."""
    needed = min_blocks_to_claim(runs)
    if blocks >= needed:
        return None
    return f"{count_text(blocks, 'block')} of {runs}: a claim needs at least {needed}"


def judge(
    comparison: Comparison,
    better: str | None,
    criteria: DecisionCriteria,
    causes: Sequence[str],
    control: Comparison | None,
) -> Verdict:
    """Return the verdict on one comparison.

    ``better``: ``higher`` or ``lower``: which values of the metric are better. ``causes``: the
    reasons why the arm has no verdict; empty if there are none. ``control``: the A/A control's
    comparison in the same row, or None if there is no control.
    """
    if causes:
        return Verdict("invalid", "; ".join(causes))
    effect = comparison.effect_pct if comparison.difference is None else comparison.difference
    if effect is None:
        return Verdict("inconclusive", "there is no complete block with values above 0")
    withheld = too_few_blocks(comparison.blocks, criteria.runs) or criteria.withheld_reason
    if withheld is not None:
        return Verdict("estimate_only", withheld)
    if comparison.p_adjusted is None or (comparison.equivalence or comparison.difference) is None:
        raise ValueError(f"{comparison.arm}: a comparison has an effect but no test")
    if comparison.p_floor is None or comparison.p_floor > criteria.alpha:
        return Verdict(
            "estimate_only",
            f"{count_text(comparison.blocks, 'block')} cannot reach p = {criteria.alpha:g} "
            f"(smallest: {comparison.p_floor:.2g})",
        )
    significant = comparison.p_adjusted <= criteria.alpha
    # p and the interval are about the mean of the runs, the effect is that of a typical run.
    means = comparison.ci_pct if comparison.difference is None else comparison.difference_ci
    directions_differ = significant and means is not None and effect * sum(means) <= 0
    if comparison.equivalence is not None and comparison.equivalence.p <= criteria.alpha:
        noise = control.ci_raw_pct if control is not None else None
        if noise is not None and max(map(abs, noise)) > criteria.margin_pct:
            return Verdict("inconclusive", NOISE_EXCEEDS_MARGIN)
        if not directions_differ:
            bound = comparison.equivalence.bound_pct
            size = None if bound is None else f"any difference is within ±{bound_text(bound)} %"
            return Verdict("trivial" if significant else "equivalent", size)
    if directions_differ:
        return Verdict("inconclusive", DIRECTIONS_DIFFER)
    if significant:
        return Verdict("better" if (effect > 0) == (better == "higher") else "worse")
    return Verdict("inconclusive", _power_reason(comparison, criteria))


def target_effect_pct(effect_pct: float) -> float:
    """Return the effect that a new study should detect: the estimated one, but at least 1 %.

    It has the estimate's sign, because a decrease is the larger log ratio: -50 % is that of +100 %.
    """
    size = max(1.0, abs(round(effect_pct, 1)))
    return size if effect_pct >= 0 else -min(size, 99.9)


def blocks_to_decide(
    comparison: Comparison, criteria: DecisionCriteria, runs: int | None = None
) -> int | None:
    """Return how many blocks a new study needs to detect the estimated effect (at least 1 %).

    None if more than 1,000 would be needed, or if the noise is not known. ``runs``: of each arm in
    a block of that study; None: as many as in this one.
    """
    if comparison.sd is None or comparison.effect_pct is None or comparison.alpha_row is None:
        return None
    return blocks_needed(
        comparison.sd,
        runs or criteria.runs,
        criteria.alpha,
        target_effect_pct(comparison.effect_pct),
        alpha_share(comparison.alpha_row, comparison.blocks, criteria.runs, criteria.alpha),
        degrees_of_freedom(comparison.blocks, criteria.runs),
    )


def _power_reason(comparison: Comparison, criteria: DecisionCriteria) -> str:
    """Return the smallest detectable effect, and the blocks that the estimated one would take."""
    parts = []
    if comparison.p is not None and comparison.p <= criteria.alpha:
        parts.append(
            f"p = {comparison.p:.2g} for this row alone, {comparison.p_adjusted:.2g} adjusted over "
            "all rows and arms"
        )
    if comparison.mde_pct is not None and comparison.sd is not None:
        text = f"smallest detectable effect: {magnitude_text(comparison.mde_pct)} %"
        target = abs(target_effect_pct(comparison.effect_pct or 0.0))
        need = blocks_to_decide(comparison, criteria)
        if need is None:
            text += f"; detecting {target:g} % would need more than 1,000 blocks"
        elif need > comparison.blocks:
            text += f"; a new study of about {need} blocks would detect {target:g} %"
        parts.append(text)
    return "; ".join(parts)
