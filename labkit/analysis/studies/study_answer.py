"""The question and the answer of a whole study, which may have many cells."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.findings.short_answer import (
    answer_wordings,
    answers_of_cells,
    arm_text,
    short_answer,
    shortest,
)
from labkit.analysis.findings.summary_verdict import summary_verdict
from labkit.analysis.findings.verdict_sentences import title
from labkit.analysis.number_format import join_names
from labkit.analysis.studies.serving_capacity import ServingCapacity, serving_capacities
from labkit.analysis.studies.study_analysis import cell_labels
from labkit.config import count_text

DIRECTED = ("faster", "slower", "mixed")


def study_question(analyses: Sequence[CellAnalysis]) -> str:
    """Return the question of a study's cells, or the question about capacity if they measure it."""
    capacities = serving_capacities(analyses)
    if capacities:
        first = capacities[0]
        return f"Up to what rate are {100 * first.target:g} % of requests within {first.limits}?"
    questions = list(dict.fromkeys(title(analysis.json) for analysis in analyses))
    return questions[0] if len(questions) == 1 else f"{len(questions)} questions"


def study_answer(analyses: Sequence[CellAnalysis]) -> str:
    """Return a study's answer in at most 20 words."""
    capacities = serving_capacities(analyses)
    if capacities:
        return shortest(_capacity(capacities))
    if len(analyses) == 1:
        return short_answer(analyses[0])
    number, answers = count_text(len(analyses), "cell"), [short_answer(one) for one in analyses]
    verdicts = [summary_verdict(analysis) for analysis in analyses]
    texts = [verdict.text for verdict in verdicts]
    counts = join_names([f"{texts.count(text)} {text}" for text in dict.fromkeys(texts)])
    candidates = [f"{number}: {counts}."]
    if len(set(answers)) == 1:
        candidates = [f"{answers[0].rstrip('.')}, in all {number}.", *candidates]
    elif set(texts) == {"computed"}:
        candidates = [*_at(analyses, -1), *candidates]
    elif together := answers_of_cells(analyses, cell_labels(analyses)):
        candidates = together
    elif directed := [i for i, verdict in enumerate(verdicts) if verdict.kind in DIRECTED]:
        candidates = [*(f"{counts}. {text}" for text in _at(analyses, directed[0])), *candidates]
    else:
        candidates = [*_by_verdict(analyses, texts), *candidates]
    return shortest(candidates)


def _at(analyses: Sequence[CellAnalysis], index: int) -> list[str]:
    """Return wordings of the answer of one cell, with its label."""
    label = cell_labels(analyses)[index]
    return [f"At {label}: {text}" for text in answer_wordings(analyses[index])]


def _by_verdict(analyses: Sequence[CellAnalysis], verdicts: Sequence[str]) -> list[str]:
    """Return the verdicts and their cells as a sentence, if all cells compare the same arms."""
    compared = {(one.data.baseline, tuple(one.data.treatment_arms)) for one in analyses}
    ((baseline, arms), *others) = compared
    if others or not arms:
        return []
    labels: dict[str, list[str]] = {}
    for label, verdict in zip(cell_labels(analyses), verdicts, strict=True):
        labels.setdefault(verdict, []).append(label)
    parts = "; ".join(
        f"{verdict} at {join_names(names)}"
        if len(labels) > 1
        else f"{verdict} in all {len(names)} cells"
        for verdict, names in labels.items()
    )
    text = f"{join_names([arm_text(arm) for arm in arms])} against {arm_text(baseline)}: {parts}."
    return [text[0].upper() + text[1:]]


def _capacity(capacities: Sequence[ServingCapacity]) -> list[str]:
    """Return wordings of the answer with every arm's capacity, the shortest last."""
    parts = [f"{arm_text(one.arm)} {_rates(one)}" for one in capacities]
    first = parts[0]
    others = len(parts) - 1
    more = f"; {count_text(others, 'other arm')} below" if others else ""
    return [f"{'; '.join(parts)}.", f"{first}{more}.", f"{first}."]


def _rates(one: ServingCapacity) -> str:
    """Return how many requests per second an arm sustains, in words."""
    low, high = one.capacity.at_least, one.capacity.below
    if low is None and high is None:
        return "is undecided at all measured rates"
    if low is None:
        return f"does not sustain {high:g} requests/s"
    return f"sustains {low:g} requests/s" + (f", not {high:g}" if high is not None else "")
