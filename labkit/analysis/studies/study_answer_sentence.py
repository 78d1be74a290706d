"""A study's question, and its answer over all cells in at most 20 words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from labkit.analysis.findings.cell_findings import Answer, Findings, merge_findings
from labkit.analysis.findings.effect_wording import NO_NAMES, Piece, optional
from labkit.analysis.findings.short_answer import Pieces, arm_text, fit, short_answer, short_pieces
from labkit.analysis.findings.verdict_sentences import summary_verdict
from labkit.analysis.robustness.cells_by_host import host_groups
from labkit.analysis.studies.cell_summary import CellSummary, cell_labels
from labkit.analysis.studies.increasing_load import (
    LOAD_OPTIONS,
    ServingCapacity,
    serving_capacities,
)
from labkit.analysis.text_format import join_names
from labkit.config import count_text

DIRECTED = ("better", "worse", "mixed")
OF_ALL_ARMS = (Answer.best_setting, Answer.outputs)  # no verdict on an arm against the baseline
KINDS = {
    "equivalent": "no difference",
    "inconclusive": "undecided",
    "estimate_only": "estimate only",
    "invalid": "no answer",
    "none": "nothing to compare",
}


def study_question(study: Sequence[CellSummary]) -> str:
    """Return the question of a study's cells, or the question about capacity if they measure it."""
    capacities = _capacities(study)
    if capacities:
        first = capacities[0]
        return f"Up to what rate are {100 * first.target:g} % of requests within {first.limits}?"
    questions = list(dict.fromkeys(cell.title for cell in study))
    return questions[0] if len(questions) == 1 else f"{len(questions)} questions"


def study_answer(study: Sequence[CellSummary]) -> str:
    """Return a study's answer in at most 20 words."""
    capacities = _capacities(study)
    if capacities:
        return fit(_capacity(capacities))
    cells, labels = [cell.findings for cell in study], cell_labels(study)
    if len(cells) == 1:
        return study[0].short_answer
    answers, verdicts = {cell.short_answer for cell in study}, list(map(summary_verdict, cells))
    texts, number = [one.text for one in verdicts], count_text(len(cells), "cell")
    kinds = [
        one.text if cell.answer in OF_ALL_ARMS else KINDS.get(one.kind, one.kind)
        for cell, one in zip(cells, verdicts, strict=True)
    ]
    parts = [f"{kind} in {kinds.count(kind)}" for kind in dict.fromkeys(kinds)]
    counts = Piece(f"{join_names(parts)} of {number}")
    if len(answers) == 1:
        return fit([*short_pieces(cells[0]), Piece(f", in all {number}")], [counts])
    if set(texts) == {"computed"}:
        return fit([Piece(f"At {labels[-1]}:"), *short_pieces(cells[-1])], [counts])
    if together := merge_findings(cells, labels):
        return short_answer(together)
    if directed := [i for i, verdict in enumerate(verdicts) if verdict.kind in DIRECTED]:
        first = directed[0]
        example = [Piece(f". At {labels[first]}:"), *short_pieces(cells[first])]
        return fit([counts, *example], [counts])
    return fit(*_by_verdict(cells, labels, texts), [counts])


def _by_verdict(
    cells: Sequence[Findings], labels: Sequence[str], verdicts: Sequence[str]
) -> list[Pieces]:
    """Return the verdicts and their cells as a sentence, if all cells compare the same arms."""
    ((baseline, arms), *others) = {(cell.baseline, cell.arms) for cell in cells}
    if others or not arms:
        return []
    places: dict[str, list[str]] = {}
    for label, verdict in zip(labels, verdicts, strict=True):
        places.setdefault(verdict, []).append(label)
    parts = [f"{verdict} at {join_names(names)}" for verdict, names in places.items()]
    if len(places) == 1:
        parts = [f"{verdicts[0]} in all {len(cells)} cells"]
    names = join_names([arm_text(arm) for arm in arms])
    return [[Piece(f"{names} against {arm_text(baseline)}: {'; '.join(parts)}")]]


def _capacities(study: Sequence[CellSummary]) -> list[ServingCapacity]:
    """Return the capacities on each machine, which is in their names if there are several."""
    groups, found = host_groups([cell.entry.machine for cell in study]), list[ServingCapacity]()
    for host, indices in groups.items():
        own = [study[index] for index in indices]
        machine = f" on {host.partition(',')[0]}" if len(groups) > 1 else ""
        for one in serving_capacities(own, cell_labels(own, LOAD_OPTIONS)):
            found.append(replace(one, suffix=f"{one.suffix}{machine}"))
    return found


def _capacity(capacities: Sequence[ServingCapacity]) -> Pieces:
    """Return every capacity, or the first and the number of the others."""
    first, *others = (f"{arm_text(one.arm)}{one.suffix} {_rates(one)}" for one in capacities)
    if not others:
        return [Piece(first)]
    brief = f"; {count_text(len(others), 'other')} in the table"
    return [Piece(first), optional(f"; {'; '.join(others)}", NO_NAMES, brief)]


def _rates(one: ServingCapacity) -> str:
    low, high = one.capacity.at_least, one.capacity.below
    if low is None and high is None:
        return "is undecided at all measured rates"
    if low is None:
        return f"does not sustain {high:g} {one.unit}"
    return f"sustains {low:g} {one.unit}" + (f", not {high:g}" if high is not None else "")
