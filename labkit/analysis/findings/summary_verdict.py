"""The verdict on a whole cell in a word or two: ``faster``, ``no difference``, ``mixed``."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.comparison.cell_analysis import CellAnalysis, CellData
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.records.metric_registry import OUTPUTS

SAME = ("equivalent", "trivial")


@dataclass(frozen=True)
class SummaryVerdict:
    """A cell's verdict. ``kind`` is one of the rows' verdict words, ``mixed`` or ``none``."""

    kind: str
    text: str


def summary_verdict(analysis: CellAnalysis) -> SummaryVerdict:
    """Return the verdict on all arms in all primary rows of a cell.

    The verdict has a direction only if all decided rows have the same one.
    """
    data = analysis.data
    if data.sweep:
        return _of_sweep(analysis)
    if OUTPUTS in data.metrics:
        return _of_outputs(analysis)
    judged = [
        one
        for one in analysis.judged
        if one.row.primary and one.comparison.arm in data.treatment_arms
    ]
    if not data.treatment_arms:
        return SummaryVerdict("none", "nothing to compare")
    words = [one.verdict.word for one in judged]
    if not words or set(words) == {"invalid"}:
        return SummaryVerdict("invalid", "no answer")
    for word, text in (("estimate_only", "estimate only"), ("computed", "computed")):
        if set(words) <= {word, "invalid"}:
            return SummaryVerdict(word, text)
    words = [word for word in words if word != "computed"]
    decided = {word for word in words if word in ("faster", "slower", *SAME)}
    if not decided:
        return SummaryVerdict("inconclusive", "undecided")
    if decided <= set(SAME):
        same = sum(word in SAME for word in words)
        return SummaryVerdict("equivalent", "no difference" + _share(same, len(words), data))
    if {"faster", "slower"} <= decided:
        return SummaryVerdict("mixed", "mixed")
    kind = "faster" if "faster" in decided else "slower"
    row = next(one.row for one in judged if one.verdict.word == kind)
    text = verdict_word(kind, row.metric, row.unit, row.better)
    return SummaryVerdict(kind, text + _share(words.count(kind), len(words), data))


def _share(part: int, total: int, data: CellData) -> str:
    """Return in how many of the primary rows, or of all arms' comparisons, a verdict holds."""
    noun = "rows" if len(data.treatment_arms) == 1 else "comparisons"
    return f" in {part} of {total} {noun}" if part < total else ""


def _of_sweep(analysis: CellAnalysis) -> SummaryVerdict:
    best = analysis.best
    if not best or all(one.best is None for one in best):
        return SummaryVerdict("invalid", "no answer")
    if any(one.withheld is not None for one in best):
        return SummaryVerdict("estimate_only", "estimate only")
    if all(len(one.possibly_best) == 1 for one in best):
        return SummaryVerdict("faster", "best setting known")
    return SummaryVerdict("inconclusive", "undecided")


def _of_outputs(analysis: CellAnalysis) -> SummaryVerdict:
    status = analysis.gates["identical"].status
    if status == "pass":
        return SummaryVerdict("equivalent", "as claimed")
    return SummaryVerdict("invalid", "not as claimed" if status == "fail" else "no answer")
