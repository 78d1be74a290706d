"""The data of a cell's answer: its findings, which are what is worth saying, decided once.

:func:`plan_findings` decides which rows answer the cell's question, what is certain about them and
what is not. Titles, headlines, chips, the index and the terminal only put the findings into words
(:mod:`labkit.analysis.findings.full_answer`, :mod:`labkit.analysis.findings.short_answer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from statistics import median_high
from typing import TYPE_CHECKING

from labkit.analysis.comparison.verdict import IF_NO_DRIFT
from labkit.analysis.findings.effect_wording import amount_text
from labkit.analysis.findings.next_command import NextCommand, next_command
from labkit.analysis.findings.output_quality_sentences import PickedFrames, picked_frames
from labkit.analysis.model.cell_model import ArmQuality, BestInRow
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.text_format import join_names
from labkit.records.metric_registry import OUTPUTS, MetricDefinition

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis

CHANGED = ("better", "worse")
SAME = ("equivalent", "trivial")
UNDECIDED = ("inconclusive", "estimate_only")


@dataclass(frozen=True)
class Finding:
    """What is known about one arm in one row.

    ``place`` is the row's name or, among several cells, the cell's. ``is_computed``: whether the
    row follows from sizes and counts, so that nothing is tested.
    """

    row: Row
    comparison: Comparison
    place: str
    is_computed: bool = False

    @property
    def metric(self) -> MetricDefinition:
        return self.row.definition

    @property
    def arm(self) -> str:
        return self.comparison.arm

    @property
    def word(self) -> str:
        """The verdict."""
        return self.comparison.verdict

    @property
    def base(self) -> float | None:
        """The median of the baseline."""
        return self.row.median(self.comparison.baseline)

    @property
    def value(self) -> float | None:
        """The median of the arm."""
        return self.row.median(self.arm)

    @property
    def is_unknown(self) -> bool:
        """Whether the row is computed, but not for the arm or not for the baseline."""
        return self.is_computed and None in (self.base, self.value)

    @property
    def effect(self) -> float:
        """The effect in percent; 0 if it is unknown, infinite if it has no percentage."""
        if self.comparison.difference:
            return math.copysign(math.inf, self.comparison.difference)
        return self.comparison.effect_pct or 0.0

    @property
    def gain(self) -> float:
        """The effect in percent, above 0 if the arm is better."""
        return self.effect if self.row.better == "higher" else -self.effect

    @property
    def bound(self) -> float:
        """The limit of the interval that is further from 0, as a size in percent."""
        return max(map(abs, self.comparison.ci_pct or (self.effect,)))


def differences_of(findings: Sequence[Finding]) -> list[float | None]:
    """Return the findings' differences in the metric's unit, where they have no percentage."""
    return [one.comparison.difference for one in findings]


def amount_of(findings: Sequence[Finding], places: Sequence[str] = ()) -> str:
    """Return how much more or less findings in one metric have: :func:`.amount_text`."""
    effects = [one.effect for one in findings]
    return amount_text(findings[0].metric, effects, places, differences_of(findings))


@dataclass(frozen=True)
class Group:
    """The findings on one arm in one metric, in all rows or cells."""

    arm: str
    metric: MetricDefinition
    all: tuple[Finding, ...]

    def those(self, words: Sequence[str]) -> tuple[Finding, ...]:
        """Return the findings with one of these verdicts, without unknown ones."""
        return tuple(one for one in self.all if one.word in words and not one.is_unknown)

    @property
    def changed(self) -> tuple[Finding, ...]:
        """The findings in which the arm is better or worse."""
        return self.those(CHANGED)

    @property
    def gain(self) -> float:
        """The median gain in percent."""
        return median_high(one.gain for one in self.all)


def group_by_arm(findings: Iterable[Finding]) -> list[Group]:
    """Return a group for each arm and metric, the arms and each arm's metrics in their order."""
    arms: dict[str, dict[str, list[Finding]]] = {}
    for one in findings:
        arms.setdefault(one.arm, {}).setdefault(one.metric.name, []).append(one)
    return [
        Group(arm, own[0].metric, tuple(own))
        for arm, metrics in arms.items()
        for own in metrics.values()
    ]


class Answer(Enum):
    """The kind of answer that findings give."""

    best_setting = auto()
    outputs = auto()
    nothing_to_compare = auto()
    none = auto()
    computed = auto()
    estimate = auto()
    undecided = auto()
    decided = auto()


@dataclass(frozen=True)
class OutputsFinding:
    """Whether the claim on the outputs holds (``pass``, ``fail``, ``unclaimed``), and why not.

    ``differing`` maps each arm to its number of outputs that differ, and of all.
    """

    claim: str
    status: str
    reason: str
    differing: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Findings:
    """What is worth saying about a cell, or about several that compare the same arms."""

    arms: tuple[str, ...]  # under test
    baseline: str
    findings: tuple[Finding, ...] = ()  # on those arms in the primary rows, row by row
    missing: tuple[str, ...] = ()  # rows and metrics without measurements
    cause: str = ""  # why nothing was measured, or why no verdict is valid
    outputs: OutputsFinding | None = None  # if the question is about them
    best: tuple[BestInRow, ...] = ()  # the best settings of a sweep, by row
    num_settings: int = 0  # of a sweep
    out_of_memory: tuple[str, ...] = ()  # arms that ran out of it, as they claimed
    noise: tuple[Finding, ...] = ()  # on the A/A control, if there is no other arm
    alone: Row | None = None  # the baseline's first primary row, if it has a median
    qualities: tuple[ArmQuality, ...] = ()  # of the arms' predictions
    frames: Mapping[str, PickedFrames] | None = None
    emulated: bool = False  # whether Metal kernels ran in the emulator
    next: NextCommand | None = None  # the command that would answer what is left open
    noun: str = "rows"  # what an arm's findings are counted by: ``rows`` or ``cells``

    @property
    def if_no_drift(self) -> bool:
        """Whether what was decided holds only if nothing drifted between the arms' runs."""
        return any(IF_NO_DRIFT in (one.comparison.reason or "") for one in self.findings)

    @property
    def measured(self) -> tuple[Finding, ...]:
        """The findings in rows that were measured."""
        return tuple(one for one in self.findings if not one.is_computed)

    @property
    def computed(self) -> tuple[Finding, ...]:
        """The findings in rows that follow from sizes and counts."""
        return tuple(one for one in self.findings if one.is_computed)

    @property
    def of_lead_metric(self) -> tuple[Finding, ...]:
        """The findings in the leading metric (:func:`leading_metrics`), invalid ones too."""
        metrics = leading_metrics(self.findings)
        return tuple(one for one in self.findings if not metrics or one.metric == metrics[-1])

    @property
    def lead(self) -> tuple[Finding, ...]:
        """The valid findings in the leading metric."""
        return tuple(one for one in self.of_lead_metric if one.word != "invalid")

    @property
    def answer(self) -> Answer:
        if self.num_settings:
            return Answer.best_setting
        if self.outputs is not None:
            return Answer.outputs
        if not self.arms:
            return Answer.nothing_to_compare
        return answer_of(self.findings)


def leading_metrics(findings: Iterable[Finding]) -> list[MetricDefinition]:
    """Return the metric that leads the answer, after the more important ones that are undecided.

    It is the first with a decided or computed finding, else the first with a valid one.
    """
    valid = [one for one in findings if one.word != "invalid"]
    metrics = list(dict.fromkeys(one.metric for one in valid))
    decided = {one.metric for one in valid if one.word in (*CHANGED, *SAME)}
    if not metrics or valid[0].is_computed or not decided:
        return metrics[:1]
    return metrics[: 1 + min(map(metrics.index, decided))]


def answer_of(findings: Sequence[Finding]) -> Answer:
    """Return the kind of answer that findings on arms give."""
    valid = [one for one in findings if one.word != "invalid"]
    words = {"computed" if one.is_computed else one.word for one in valid}
    if not words:
        return Answer.none
    if words == {"computed"}:
        return Answer.computed
    if words == {"estimate_only"}:
        return Answer.estimate
    return Answer.undecided if words.isdisjoint((*CHANGED, *SAME)) else Answer.decided


def plan_findings(analysis: CellAnalysis) -> Findings:
    """Return the findings of a cell."""
    data, cell = analysis.data, analysis.cell
    arms, primary = tuple(cell.treatment_arms), cell.primary_rows
    findings = [
        Finding(row, one, cell.row_name(row), _is_computed(row, one))
        for row in primary
        for one in row.comparisons
    ]
    own = tuple(finding for finding in findings if finding.arm in arms)
    failed = any(gate.status == "fail" for gate in cell.gates.values())
    alone = next((row for row in primary if row.metric), None)
    return Findings(
        arms,
        cell.baseline,
        own,
        missing=_missing(analysis),
        cause=_cause(analysis, own),
        outputs=_outputs(analysis) if OUTPUTS in data.design.metrics else None,
        best=cell.best or (),
        num_settings=len(arms) + 1 if cell.sweep else 0,
        out_of_memory=() if failed else tuple(arm.name for arm in data.arms if arm.out_of_memory),
        noise=tuple(finding for finding in findings if finding.arm == cell.control),
        alone=alone if alone is not None and alone.median(cell.baseline) is not None else None,
        qualities=tuple(one for one in data.qualities if one.arm in arms),
        frames=picked_frames(data),
        emulated=bool(data.emulated),
        next=next_command(analysis),
    )


def _is_computed(row: Row, comparison: Comparison) -> bool:
    """Return whether a row is computed, also for an arm that has no value in it."""
    if row.median(comparison.arm) is None:
        return any(one.verdict == "computed" for one in row.comparisons)
    return comparison.verdict == "computed"


def _missing(analysis: CellAnalysis) -> tuple[str, ...]:
    names = [row.case for row in analysis.cell.primary_rows if row.skipped is not None]
    measured = {row.metric for row in analysis.cell.rows}
    names += [m for m in analysis.data.design.metrics if m not in measured and m != OUTPUTS]
    return tuple(names)


def _cause(analysis: CellAnalysis, findings: Sequence[Finding]) -> str:
    """Return why there is no valid finding: the runs that ended, the gates that failed."""
    if any(one.word != "invalid" for one in findings):
        return ""
    records = analysis.data.records
    failed = [r.arm for r in records if not r.ok and "failed_by" not in r.notes]
    if failed and not any(record.ok for record in records):
        return f"nothing was measured, because {join_names(list(dict.fromkeys(failed)))} failed"
    gates = [name for name, gate in analysis.cell.gates.items() if gate.status == "fail"]
    if not gates:
        return str(findings[0].comparison.reason) if findings else "nothing was measured"
    return f"the gate{'s' * (len(gates) > 1)} {join_names(gates)} failed"


def _outputs(analysis: CellAnalysis) -> OutputsFinding:
    gate = analysis.gates["identical"]
    differing = {
        one.arm: (one.total - one.agree, one.total)
        for one in analysis.identity.agreement
        if one.agree < one.total
    }
    reason = gate.reasons[0] if gate.reasons else "the outputs were not compared"
    return OutputsFinding(analysis.data.arms[0].identity, gate.status, reason, differing)


def merge_findings(cells: Sequence[Findings], labels: Sequence[str]) -> Findings | None:
    """Return the findings of several cells together; each finding's place is its cell's label.

    None unless all cells compare the same arms in the same metric, have an answer, and ran out of
    memory in the same arms, as claimed.
    """
    metrics = leading_metrics(one for cell in cells for one in cell.findings)
    leads = [[one for one in cell.findings if one.metric in metrics] for cell in cells]
    rows = [len({one.place for one in lead if one.metric == metrics[-1]}) for lead in leads]
    merged = [
        replace(one, place=f"{label}, {one.place}" if count > 1 else label)
        for lead, label, count in zip(leads, labels, rows, strict=True)
        for one in lead
    ]
    special = {Answer.best_setting, Answer.outputs, Answer.nothing_to_compare}
    if (
        any(cell.answer in special for cell in cells)
        or len({(cell.baseline, cell.arms, cell.out_of_memory) for cell in cells}) > 1
        or not all(rows)
    ):
        return None
    noun = "cells" if sum(rows) == len(cells) else f"rows of {len(cells)} cells"
    one = cells[0]
    found = tuple(merged)
    return Findings(one.arms, one.baseline, found, out_of_memory=one.out_of_memory, noun=noun)
