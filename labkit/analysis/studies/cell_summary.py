"""What a study's pages say: of each cell, without its records, and the answer of all cells.

A cell's records and analysis take up to 20 MB; this takes less than a thousandth. So a study of a
thousand cells is read cell by cell, and only this is kept of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.analysis.comparison.arm_comparison import PairedRow, paired_rows, paired_tests
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.findings.answer_data import (
    Answer,
    Findings,
    merge_findings,
    plan_findings,
)
from labkit.analysis.findings.effect_wording import NO_NAMES, Piece, optional
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import Pieces, arm_text, fit, short_answer, short_pieces
from labkit.analysis.findings.verdict_sentences import summary_verdict
from labkit.analysis.model.result_row import Row
from labkit.analysis.model.study_model import CellEntry
from labkit.analysis.number_format import join_names
from labkit.analysis.robustness.caveats import machine_states
from labkit.analysis.robustness.host_groups import machine_name
from labkit.analysis.statistics.multiple_comparisons import RowPermutations
from labkit.analysis.studies.serving_capacity import (
    ArmLoad,
    CapacityLoad,
    ServingCapacity,
    arm_loads,
    capacity_loads,
    serving_capacities,
)
from labkit.config import count_text
from labkit.config.arm_sweep import short_names
from labkit.records import PROCESSES_SUFFIX

DIRECTED = ("better", "worse", "mixed")
OF_ALL_ARMS = (Answer.best_setting, Answer.outputs)  # no verdict on an arm against the baseline
KINDS = {
    "equivalent": "no difference",
    "inconclusive": "undecided",
    "estimate_only": "estimate only",
    "invalid": "no answer",
    "none": "nothing to compare",
}


@dataclass(frozen=True)
class TestedArm:
    """An arm's tests in the primary rows of a cell. ``names``: case and metric of each row."""

    arm: str
    runs: int  # of each arm per block
    names: tuple[tuple[str, str | None], ...]
    rows: tuple[PairedRow, ...]

    def tests(self) -> dict[int, RowPermutations]:
        """Return the rows' permutation tests, in the order of ``names``."""
        return paired_tests(self.rows, self.runs)


@dataclass(frozen=True)
class CellSummary:
    """What a study's pages say of one cell.

    ``machine_states``: as :func:`.caveats.machine_states`. ``loads`` and ``capacities``: what load
    curves and capacities are made of; empty in a cell that only confirms another. ``tested``: the
    arms that may be claimed about. ``unlisted``: the number of records without a digest.
    """

    entry: CellEntry
    title: str
    overrides: tuple[str, ...]
    primary: tuple[Row, ...]
    findings: Findings
    machine_states: Mapping[str, list[str]]
    loads: tuple[ArmLoad, ...] = ()
    capacities: tuple[CapacityLoad, ...] = ()
    tested: tuple[TestedArm, ...] = ()
    unlisted: int = 0

    @property
    def name(self) -> str:
        """Name of the cell: its overrides."""
        return self.entry.cell

    @cached_property
    def short_answer(self) -> str:
        """The answer to the cell's question in at most 20 words."""
        return short_answer(self.findings)


def cell_summary(analysis: CellAnalysis) -> CellSummary:
    """Return what a study's pages say of a cell."""
    findings, cell = plan_findings(analysis), analysis.cell
    confirms = analysis.data.dir.name.endswith(PROCESSES_SUFFIX)  # another cell has its loads
    return CellSummary(
        entry=_entry(analysis, findings),
        title=cell.title,
        overrides=tuple(analysis.data.manifest.get("overrides") or [analysis.name]),
        primary=tuple(cell.primary_rows),
        findings=findings,
        machine_states=machine_states(analysis),
        loads=() if confirms else tuple(arm_loads(analysis)),
        capacities=() if confirms else tuple(capacity_loads(analysis)),
        tested=tuple(_tested(analysis)),
        unlisted=analysis.data.unlisted,
    )


def _entry(analysis: CellAnalysis, findings: Findings) -> CellEntry:
    cell, data = analysis.cell, analysis.data
    arms = set(cell.treatment_arms)
    comparisons = (one for row in cell.primary_rows for one in row.comparisons)
    return CellEntry(
        cell=cell.cell,
        dir=data.dir.name,
        machine=machine_name(analysis),
        question=cell.question,
        answer=long_text(findings),
        status=analysis.status,
        complete=data.complete,
        blocks=len(data.blocks_done),
        runs=len(data.records),
        failures=len(cell.failures),
        gates={name: gate.status for name, gate in cell.gates.items()},
        verdicts=dict(Counter(one.verdict for one in comparisons if one.arm in arms)),
    )


def _tested(analysis: CellAnalysis) -> Iterator[TestedArm]:
    """Yield the arms of a cell that have tests; none while nothing may be claimed."""
    data, runs = analysis.data, analysis.data.criteria.runs
    for arm in data.treatment_arms if data.withheld_reason is None else ():
        paired = paired_rows(analysis.rows, arm, data.baseline, runs, True)
        estimates = data.design.estimates  # nothing is claimed of them
        rows = [row for row in paired if analysis.rows[row.index].case not in estimates]
        if rows:
            of_rows = [analysis.rows[row.index] for row in rows]
            names = tuple((row.case, row.metric) for row in of_rows)
            yield TestedArm(arm, runs, names, tuple(rows))


def cell_labels(cells: Sequence[CellSummary], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in cell.overrides if override.partition("=")[0] not in ignore]
        for cell in cells
    ]
    if len(cells) == 1:
        return [", ".join(listed[0]) or cells[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, cell.entry.dir)
        for overrides, cell in zip(varying, cells, strict=True)
    ]


def _label(overrides: Sequence[str], short: dict[str, str], folder: str) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if folder.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"


def study_question(study: Sequence[CellSummary]) -> str:
    """Return the question of a study's cells, or the question about capacity if they measure it."""
    capacities = serving_capacities(study)
    if capacities:
        first = capacities[0]
        return f"Up to what rate are {100 * first.target:g} % of requests within {first.limits}?"
    questions = list(dict.fromkeys(cell.title for cell in study))
    return questions[0] if len(questions) == 1 else f"{len(questions)} questions"


def study_answer(study: Sequence[CellSummary]) -> str:
    """Return a study's answer in at most 20 words."""
    capacities = serving_capacities(study)
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
    parts = "; ".join(
        f"{verdict} at {join_names(names)}"
        if len(places) > 1
        else f"{verdict} in all {len(names)} cells"
        for verdict, names in places.items()
    )
    names = join_names([arm_text(arm) for arm in arms])
    return [[Piece(f"{names} against {arm_text(baseline)}: {parts}")]]


def _capacity(capacities: Sequence[ServingCapacity]) -> Pieces:
    """Return every arm's capacity, or the first arm's and the number of the others."""
    first, *others = (f"{arm_text(one.arm)} {_rates(one)}" for one in capacities)
    if not others:
        return [Piece(first)]
    brief = f"; {count_text(len(others), 'other arm')} below"
    return [Piece(first), optional(f"; {'; '.join(others)}", NO_NAMES, brief)]


def _rates(one: ServingCapacity) -> str:
    low, high = one.capacity.at_least, one.capacity.below
    if low is None and high is None:
        return "is undecided at all measured rates"
    if low is None:
        return f"does not sustain {high:g} requests/s"
    return f"sustains {low:g} requests/s" + (f", not {high:g}" if high is not None else "")
