"""The question and the answer of a whole study, which may have many cells."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import count_text, join_names
from labkit.analysis.serving_capacity import ServingCapacity, serving_capacities
from labkit.analysis.short_answer import arm_text, short_answer, shortest
from labkit.analysis.summary_verdict import summary_verdict
from labkit.analysis.verdict_sentences import title


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
    counts: dict[str, int] = {}
    for analysis in analyses:
        word = summary_verdict(analysis).text
        counts[word] = counts.get(word, 0) + 1
    parts = join_names([f"{count} {word}" for word, count in counts.items()])
    return f"{count_text(len(analyses), 'cell')}: {parts}."


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
