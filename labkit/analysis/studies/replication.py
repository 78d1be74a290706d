"""A reader's study beside the author's: which effects were replicated, row by row.

Only effects are compared, never the times of two machines. The decisions are those of
:mod:`labkit.analysis.statistics.replication_test`; a row is not decided if a gate failed in one of
the studies. Computed values have no noise: they are replicated within the author's margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.verdict import DECIDED_WORDS
from labkit.analysis.model.replication_result import (
    MeasuredEffect,
    ReplicatedRow,
    Replication,
    ReplicationSide,
)
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import (
    interval_text,
    magnitude_text,
    percent_text,
    round_significant,
)
from labkit.analysis.statistics.difference_in_differences import StudyEffect, effect_change
from labkit.analysis.statistics.hodges_lehmann import to_log_ratio, to_percent
from labkit.analysis.statistics.replication_test import (
    Interval,
    ReplicationDecision,
    ReplicationRow,
    ReplicationWord,
    decide_replication,
    region_of,
    times_as_long,
)
from labkit.analysis.studies.between_study_comparison import arm_sample, may_have_stalled
from labkit.analysis.studies.cell_summary import cell_labels, cell_summary
from labkit.analysis.studies.study_analysis import study_name
from labkit.analysis.studies.study_answer_sentence import study_question
from labkit.config import count_text
from labkit.records import (
    MACHINE_FIELDS,
    PROCESSES_SUFFIX,
    SCHEMA_VERSION,
    ArchivePath,
    RecordError,
    StudyPath,
)

NO_RATIO = "an effect from or to 0 has no ratio that could be compared"
MAX_BLOCKS = 200  # that a reader may be expected to run
FACTS = (*MACHINE_FIELDS, "cores_usable", "os_release", "architecture", "python", "git")


@dataclass(frozen=True)
class _Pair:
    """One comparison of the author's in a row, and the reader's same row, if there is one."""

    author: CellAnalysis
    reader: CellAnalysis | None
    row: Row
    one: Comparison
    here: Row | None

    @property
    def other(self) -> Comparison | None:
        """The reader's comparison."""
        return None if self.here is None else self.here.comparison(self.one.arm)

    @property
    def claimed(self) -> Interval | None:
        """The author's interval in percent, or None if the author claims nothing."""
        return self.one.ci_pct if self.one.verdict in DECIDED_WORDS else None

    @property
    def effects(self) -> list[float]:
        """The known effects, as log ratios."""
        both = [one.effect_pct for one in (self.one, self.other) if one is not None]
        return [to_log_ratio(effect) for effect in both if effect is not None and effect > -100]

    @property
    def medians(self) -> list[float | None]:
        """The medians of the author's baseline and arm, and of the reader's."""
        names, rows = (self.one.baseline, self.one.arm), (self.row, self.here)
        return [None if row is None else row.median(name) for row in rows for name in names]

    @property
    def reason(self) -> str | None:
        """Why nothing can be decided, or None."""
        reader, other = self.reader, self.other
        values = self.medians[2:]
        if reader is None or other is None or (None in values and other.verdict == "computed"):
            unlike = None if reader is None else self._unlike(reader)
            if unlike is not None:
                return f"measured in {unlike.unit} here ({unlike.better} is better)"
            skipped = None if self.here is None else self.here.skipped
            return f"not measured here{f': {skipped}' if skipped else ''}"
        causes = reader.causes(self.one.arm, self.row)
        if not causes and reader.data.withheld_reason is not None:
            causes = [reader.data.withheld_reason]
        withheld = other.is_withheld(reader.data.criteria.margin_pct)
        if not causes and (withheld or other.verdict in ("estimate_only", "invalid")):
            causes = [other.reason or other.verdict]
        return "; ".join(causes) or None

    def _unlike(self, reader: CellAnalysis) -> Row | None:
        """Return the reader's row of the same name in another unit or direction, or None."""
        rows = (r for r in reader.cell.rows if (r.case, r.metric) == self.key[:2])
        return next((row for row in rows if row.skipped is None and self.here is None), None)

    @property
    def key(self) -> tuple[str | None, ...]:
        return self.row.case, self.row.metric, self.one.arm


def _pairs(author: Sequence[CellAnalysis], reader: Sequence[CellAnalysis]) -> Iterator[_Pair]:
    here = {analysis.data.dir.name: analysis for analysis in reader}
    for cell in author:
        if cell.data.dir.name.endswith(PROCESSES_SUFFIX):  # it only confirms another
            continue
        other = here.get(cell.data.dir.name)
        found = other.cell.rows if other is not None else ()
        rows = {(r.case, r.metric, r.unit, r.better): r for r in found}
        skipped = {r.case: r for r in found if r.skipped is not None}
        for row in cell.cell.primary_rows:
            for one in row.comparisons:
                if one.arm in cell.data.treatment_arms:
                    key = row.case, row.metric, row.unit, row.better
                    same = rows.get(key) or skipped.get(row.case)
                    yield _Pair(cell, other, row, one, same)


def _labels(author: Sequence[CellAnalysis]) -> dict[str, str]:
    """Return the label of each of the author's cells, by its folder's name."""
    cells = [one for one in author if not one.data.dir.name.endswith(PROCESSES_SUFFIX)]
    labels = cell_labels(list(map(cell_summary, cells)))
    return {cell.data.dir.name: label for cell, label in zip(cells, labels, strict=True)}


def _test_row(pair: _Pair) -> ReplicationRow | None:
    """Return what the test needs, or None if the author claims nothing or a study is not valid."""
    limits, other, effects = pair.claimed, pair.other, list[StudyEffect]()
    if limits is None or other is None or pair.reader is None or pair.reason is not None:
        return None
    stalls = may_have_stalled(pair.author, pair.reader)
    for analysis in (pair.author, pair.reader):
        for row in analysis.rows_by_stalls(included=stalls):
            same = (row.case, row.metric) == (pair.row.case, pair.row.metric)
            if same and (sample := arm_sample(analysis, row, pair.one.arm)) is not None:
                effects.append(sample.effect())
    if len(effects) < 2:
        return None
    before, after = effects[0], effects[1]
    here = None if other.ci_pct is None else _logs(other.ci_pct)
    change = effect_change(before, after)
    return ReplicationRow((before, after), change, _logs(limits), here, _margin(pair.author))


def _margin(analysis: CellAnalysis) -> Interval:
    margin_pct = analysis.data.criteria.margin_pct
    return _logs((-margin_pct, margin_pct))


def _alpha(pairs: Sequence[_Pair]) -> float:
    """Return the smallest alpha at which a study decided one of these rows; 0.0 without a row.

    A row that an earlier look decided rests on that look's data, which may spend no more.
    """
    sides = ((pair.row.case, (pair.author, pair.reader)) for pair in pairs)
    alphas = [one.data.criteria_of(case).alpha for case, both in sides for one in both if one]
    return min(alphas, default=0.0)


def _logs(limits: Interval) -> Interval:
    return to_log_ratio(limits[0]), to_log_ratio(limits[1])


def forecast_lines(author: Sequence[CellAnalysis]) -> Iterator[str]:
    """Yield what a replication will decide about each claim, and the blocks that it would take.

    The noise is taken to be the author's, so the blocks are those of the author's length.

    Raises ``RecordError`` if the author's study has no primary row with an arm under test.
    """
    pairs = list(_pairs(author, ()))
    if not pairs:
        raise RecordError("the author's study compares no arm with its baseline in a primary row")
    claims = [pair for pair in pairs if pair.claimed is not None]
    if not claims:
        yield "the author's study claims no effect; only computed numbers can be compared"
    labels, level = _labels(author), _alpha(claims) / max(1, len(claims))
    for pair in claims:
        one, limits = pair.one, pair.claimed
        cell = labels[pair.author.data.dir.name] if len(labels) > 1 else None
        index = pair.author.cell.rows.index(pair.row)
        found = arm_sample(pair.author, pair.author.rows[index], one.arm)
        if found is None or limits is None:
            continue
        effect, equal = found.effect(), one.verdict in ("equivalent", "trivial")
        region = region_of(effect, _logs(limits), _margin(pair.author))
        more = times_as_long(effect, effect, region, level, is_equal=equal)
        blocks = len(found.baseline) * more
        need = "the author's study is too short to show it; a large change can be shown"
        if blocks <= MAX_BLOCKS:
            count = count_text(max(1, math.ceil(blocks)), "block")
            need = f"about {count} as noisy as the author's can show it"
        yield (
            f"{', '.join(filter(None, (cell, *pair.key)))}: the author has "
            f"{percent_text(one.effect_pct)} ({interval_text(*limits)}); replicated if "
            f"the same within ±{magnitude_text(to_percent(region))} %: {need}"
        )


def _untested(pair: _Pair) -> ReplicationDecision:
    """Decide a row without a test: the author claims nothing, or values are computed."""
    word, computed = ReplicationWord.no_claim, pair.one.verdict == "computed"
    if pair.one.verdict in DECIDED_WORDS or (computed and None not in pair.medians[:2]):
        word = ReplicationWord.not_decided
    if computed and pair.reason is None and (changes := _computed_changes(pair)) is not None:
        author, reader, margin = changes
        word = ReplicationWord.not_replicated
        word = ReplicationWord.other_size if author * reader > 0 else word
        word = ReplicationWord.replicated if abs(reader - author) <= margin else word
    return ReplicationDecision(word, None, 1.0, 0.0)


def _computed_changes(pair: _Pair) -> tuple[float, float, float] | None:
    """Return the author's and the reader's computed effect, and what may be between equal ones.

    They are log ratios or, if a value is 0, in percent or, if a baseline is, in the metric's unit.
    """
    margin_pct, logs, other = pair.author.data.criteria.margin_pct, pair.effects, pair.other
    if len(logs) == 2:
        return logs[0], logs[1], to_log_ratio(margin_pct)
    if other is not None and pair.one.effect_pct is not None and other.effect_pct is not None:
        return pair.one.effect_pct, other.effect_pct, margin_pct
    known = [value for value in pair.medians if value is not None]
    if len(known) < len(pair.medians):
        return None
    base, arm, base_here, arm_here = known
    return arm - base, arm_here - base_here, margin_pct / 100 * max(abs(base), abs(arm))


def _row(
    pair: _Pair, cell: str, test: ReplicationRow | None, decision: ReplicationDecision
) -> ReplicatedRow:
    logs, undecided = pair.effects, decision.word is ReplicationWord.not_decided
    untested = NO_RATIO if test is None and pair.one.verdict in DECIDED_WORDS else None
    row = ReplicatedRow(
        cell=cell,
        case=pair.row.case,
        metric=pair.row.metric or "",
        unit=pair.row.unit or "",
        arm=pair.one.arm,
        author=_measured(pair.row, pair.one.arm),
        reader=_measured(pair.here, pair.one.arm),
        verdict=decision.word.value,
        reason=(pair.reason or untested) if undecided else None,
        ratio=round_significant(logs[1] / logs[0]) if len(logs) == 2 and logs[0] else None,
    )
    if test is None:
        return row
    low, high = decision.interval or (None, None)
    records = pair.reader.data.records if pair.reader is not None else ()
    needed_s = sum(r.seconds.get("process", math.nan) for r in records)
    needed_s *= decision.more or math.nan
    return replace(
        row,
        change_pct=_percent(test.change.estimate),
        change_low_pct=_percent(low),
        change_high_pct=_percent(high),
        region_pct=_percent(decision.region),
        p_adjusted=round_significant(decision.p_adjusted),
        needed_s=needed_s if math.isfinite(needed_s) else None,
        reason="the author's study is too short to tell" if needed_s == math.inf else row.reason,
    )


def _percent(log_ratio: float | None) -> float | None:
    return None if log_ratio is None else round_significant(to_percent(log_ratio))


def _measured(row: Row | None, arm: str) -> MeasuredEffect:
    one = None if row is None else row.comparison(arm)
    if row is None or one is None:
        return MeasuredEffect()
    return MeasuredEffect(
        round_significant(row.median(one.baseline)),
        round_significant(row.median(arm)),
        one.effect_pct,
        one.ci_low_pct,
        one.ci_high_pct,
        one.verdict,
    )


def replication_of(
    author: tuple[StudyPath, Sequence[CellAnalysis]],
    reader: tuple[StudyPath, Sequence[CellAnalysis]],
    changes: Sequence[str] = (),
    package_versions: str = "ours",
) -> Replication:
    """Return the replication of the author's study by the reader's.

    ``changes``: what the reader changed of the question.
    """
    pairs, labels = list(_pairs(author[1], reader[1])), _labels(author[1])
    tested = {index: row for index, pair in enumerate(pairs) if (row := _test_row(pair))}
    alpha = _alpha([pairs[i] for i in tested])
    decisions = dict(zip(tested, decide_replication(list(tested.values()), alpha), strict=True))
    cells = (labels[pair.author.data.dir.name] for pair in pairs)
    rows = (
        _row(pair, cell, tested.get(i), decisions.get(i) or _untested(pair))
        for i, (pair, cell) in enumerate(zip(pairs, cells, strict=True))
    )
    return Replication(
        schema_version=SCHEMA_VERSION,
        question=study_question(list(map(cell_summary, author[1]))),
        author=_side(*author),
        reader=_side(*reader),
        alpha=alpha,
        package_versions=package_versions,
        changes=tuple(changes),
        differences=tuple(_differences(author[1], reader[1])),
        rows=tuple(rows),
    )


def _environment(analyses: Sequence[CellAnalysis]) -> dict[str, Any]:
    return next((a.environment for a in analyses if a.environment), {})


def _side(study: StudyPath, analyses: Sequence[CellAnalysis]) -> ReplicationSide:
    environment = _environment(analyses)
    dates = (record.started for a in analyses for record in a.data.records)
    return ReplicationSide(
        study=study_name(study),
        date=min(dates, default="")[:10],
        archive_sha256=study.archive.digest if isinstance(study, ArchivePath) else None,
        machine={name: environment.get(name) for name in MACHINE_FIELDS},
        versions=dict(environment.get("versions") or {}),
        git=environment.get("git"),
    )


def _differences(author: Sequence[CellAnalysis], reader: Sequence[CellAnalysis]) -> Iterator[str]:
    facts = [
        {key: one.get(key) for key in FACTS} | (one.get("versions") or {})
        for one in map(_environment, (author, reader))
    ]
    for key in dict.fromkeys([*facts[0], *facts[1]]):
        before, after = (_fact(key, one.get(key)) for one in facts)
        if before != after:
            name = "labkit's revision" if key == "git" else key.removesuffix("_bytes")
            yield f"{name.replace('_', ' ')}: {before}, here {after}"
    designs = {a.data.dir.name: a.data.design.isolation for a in author}
    for name, isolation in ((a.data.dir.name, a.data.design.isolation) for a in reader):
        if designs.get(name, isolation) != isolation:
            yield f"design.isolation of {name}: {designs[name]}, here {isolation}"


def _fact(key: str, value: Any) -> str:
    if value is None:
        return "none"
    return f"{value / 2**30:.1f} GiB" if key == "memory_bytes" else str(value)[:40]
