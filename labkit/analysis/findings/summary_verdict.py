"""The verdict on a whole cell in a word or two: ``less time``, ``no difference``, ``mixed``."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.findings.cell_findings import CHANGED, SAME, Answer, Findings
from labkit.analysis.findings.effect_wording import direction_word

TEXTS = {
    Answer.nothing_to_compare: ("none", "nothing to compare"),
    Answer.none: ("invalid", "no answer"),
    Answer.estimate: ("estimate_only", "estimate only"),
    Answer.computed: ("computed", "computed"),
    Answer.undecided: ("inconclusive", "undecided"),
}
MAX_WORDS = 2  # more metrics than that are only better or worse
OF_OUTPUTS = {"pass": ("equivalent", "as claimed"), "fail": ("invalid", "not as claimed")}


@dataclass(frozen=True)
class SummaryVerdict:
    """A cell's verdict. ``kind`` is one of the rows' verdict words, ``mixed`` or ``none``."""

    kind: str
    text: str


def summary_verdict(findings: Findings) -> SummaryVerdict:
    """Return the verdict on all arms in all primary rows of a cell.

    It is mixed if some rows are better and others worse. Rows without a change lower the share.
    """
    if findings.answer is Answer.best_setting:
        return _of_sweep(findings)
    if findings.outputs is not None:
        of_outputs = OF_OUTPUTS.get(findings.outputs.status, TEXTS[Answer.none])
        return SummaryVerdict(*of_outputs)
    if findings.answer in TEXTS:
        return SummaryVerdict(*TEXTS[findings.answer])
    tested = [one for one in findings.findings if one.word != "computed"]
    counts = {word: sum(one.word == word for one in tested) for word in (*CHANGED, *SAME)}
    if counts["better"] and counts["worse"]:
        return SummaryVerdict("mixed", "mixed")
    kind = next((word for word in CHANGED if counts[word]), None)
    if kind is None:
        same = sum(counts[word] for word in SAME)
        return SummaryVerdict("equivalent", "no difference" + _share(same, len(tested), findings))
    words = [direction_word(e.metric, e.effect > 0) for e in tested if e.word == kind]
    text = ", ".join(dict.fromkeys(words)) if len(set(words)) <= MAX_WORDS else kind
    return SummaryVerdict(kind, text + _share(counts[kind], len(tested), findings))


def _share(part: int, total: int, findings: Findings) -> str:
    """Return in how many of the primary rows, or of all arms' comparisons, a verdict holds."""
    noun = "rows" if len(findings.arms) == 1 else "comparisons"
    return f" in {part} of {total} {noun}" if part < total else ""


def _of_sweep(findings: Findings) -> SummaryVerdict:
    if all(one.best is None for one in findings.best):
        return SummaryVerdict(*TEXTS[Answer.none])
    if any(one.withheld is not None for one in findings.best):
        return SummaryVerdict(*TEXTS[Answer.estimate])
    if all(len(one.possibly_best) == 1 for one in findings.best):
        return SummaryVerdict("better", "best setting known")
    return SummaryVerdict(*TEXTS[Answer.undecided])
