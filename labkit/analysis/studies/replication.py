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

from labkit.analysis.comparison.cell_analysis import CellAnalysis, JudgedComparison
from labkit.analysis.comparison.observations import MetricRow
from labkit.analysis.model.replication_model import (
    MeasuredEffect,
    ReplicatedRow,
    Replication,
    ReplicationSide,
)
from labkit.analysis.number_format import (
    interval_text,
    magnitude_text,
    percent_text,
    round_significant,
)
from labkit.analysis.statistics.difference_in_differences import effect_change
from labkit.analysis.statistics.effect_size import to_log_ratio, to_percent
from labkit.analysis.statistics.replication_test import (
    Interval,
    ReplicationDecision,
    ReplicationRow,
    ReplicationWord,
    decide_replication,
    region_of,
    times_as_long,
)
from labkit.analysis.studies.study_analysis import study_name
from labkit.analysis.studies.study_answer import study_question
from labkit.analysis.studies.study_diff import arm_effect, may_have_stalled, median_of
from labkit.config import count_text
from labkit.records import (
    MACHINE_FIELDS,
    PROCESSES_SUFFIX,
    SCHEMA_VERSION,
    ArchivePath,
    RecordError,
    StudyPath,
)

CLAIMS = ("better", "worse", "equivalent", "trivial")
MAX_BLOCKS = 200  # that a reader may be expected to run
SAME = 1e-9  # log ratio: rounding of computed values


@dataclass(frozen=True)
class _Pair:
    """One comparison of the author's, and the reader's of the same row, if there is one."""

    author: CellAnalysis
    reader: CellAnalysis | None
    one: JudgedComparison
    other: JudgedComparison | None

    @property
    def reason(self) -> str | None:
        """Why nothing can be decided, or None."""
        reader, other = self.reader, self.other
        if reader is None or other is None or other.row.skipped is not None:
            skipped = other.row.skipped if other is not None else None
            return f"not measured here{f': {skipped}' if skipped else ''}"
        causes = reader.causes(self.one.comparison.arm, self.one.row.metric)
        if not causes and reader.data.withheld_reason is not None:
            causes = [reader.data.withheld_reason]
        if not causes and other.verdict.word in ("estimate_only", "invalid"):
            causes = [other.verdict.reason or other.verdict.word]
        return "; ".join(causes) or None


def replicated_rows(
    author: Sequence[CellAnalysis], reader: Sequence[CellAnalysis]
) -> tuple[tuple[ReplicatedRow, ...], float]:
    """Return a row for each arm in each primary row of the author's, and the family's alpha.

    Raises
    ------
    RecordError
        The author's study has no primary row with an arm under test.
    """
    here = {analysis.data.dir.name: analysis for analysis in reader}
    pairs = [pair for analysis in asked_cells(author) for pair in _pairs(analysis, here)]
    if not pairs:
        raise RecordError("the author's study compares no arm with its baseline")
    tested = {index: row for index, pair in enumerate(pairs) if (row := _test_row(pair))}
    alphas = [pairs[i].author.data.criteria.alpha for i in tested]
    alphas += [a.data.criteria.alpha for i in tested if (a := pairs[i].reader) is not None]
    alpha = min(alphas, default=0.0)
    decisions = dict(zip(tested, decide_replication(list(tested.values()), alpha), strict=True))
    rows = (
        _row(pair, tested.get(i), decisions.get(i) or _untested(pair))
        for i, pair in enumerate(pairs)
    )
    return tuple(rows), alpha


def asked_cells(analyses: Sequence[CellAnalysis]) -> list[CellAnalysis]:
    """Return the cells that ask something: not those that only confirm others."""
    return [a for a in analyses if not a.data.dir.name.endswith(PROCESSES_SUFFIX)]


def _pairs(author: CellAnalysis, here: dict[str, CellAnalysis]) -> Iterator[_Pair]:
    reader = here.get(author.data.dir.name)
    others = {_key(one): one for one in (reader.judged if reader is not None else ())}
    for one in author.judged:
        if one.row.primary and one.comparison.arm in author.data.treatment_arms:
            yield _Pair(author, reader, one, others.get(_key(one)))


def _key(one: JudgedComparison) -> tuple[Any, ...]:
    return one.row.case, one.row.metric, one.comparison.arm


def _test_row(pair: _Pair) -> ReplicationRow | None:
    """Return what the test needs, or None if the author claims nothing or a study is not valid."""
    one, other = pair.one, pair.other
    limits = one.comparison.ci_pct
    if one.verdict.word not in CLAIMS or limits is None or pair.reason is not None:
        return None
    assert other is not None and pair.reader is not None
    effects = []
    stalls = may_have_stalled(pair.author, pair.reader)
    for analysis in (pair.author, pair.reader):
        rows = analysis.rows_by_stalls(included=stalls)
        row = next((row for row in rows if _same_row(row, one.row)), None)
        effect = None if row is None else arm_effect(analysis, row, one.comparison.arm)
        if effect is None:
            return None
        effects.append(effect[0])
    author, reader = effects
    return ReplicationRow(
        (author, reader),
        effect_change(author, reader),
        _logs(limits),
        None if other.comparison.ci_pct is None else _logs(other.comparison.ci_pct),
        to_log_ratio(pair.author.data.criteria.margin_pct),
    )


def forecast_lines(author: Sequence[CellAnalysis]) -> Iterator[str]:
    """Yield what a replication will decide about each claim, and the blocks that it would take.

    The noise is taken to be the author's, so the blocks are those of the author's length.
    """
    claims = [
        pair
        for analysis in asked_cells(author)
        for pair in _pairs(analysis, {})
        if pair.one.verdict.word in CLAIMS and pair.one.comparison.ci_pct is not None
    ]
    for pair in claims:
        one, data = pair.one, pair.author.data
        found = arm_effect(pair.author, one.row, one.comparison.arm)
        limits = one.comparison.ci_pct
        if found is None or limits is None:
            continue
        margin, interval = to_log_ratio(data.criteria.margin_pct), _logs(limits)
        region = region_of(found[0], interval, margin)
        equal = one.verdict.word in ("equivalent", "trivial")
        level = data.criteria.alpha / len(claims)
        blocks = found[1] * times_as_long(found[0], found[0], region, level, is_equal=equal)
        need = "the author's study is too short to show it; a large change can be shown"
        if blocks <= MAX_BLOCKS:
            count = count_text(max(1, math.ceil(blocks)), "block")
            need = f"about {count} as noisy as the author's can show it"
        name = ", ".join(filter(None, (one.row.case, one.row.metric, one.comparison.arm)))
        yield (
            f"{name}: the author has {percent_text(one.comparison.effect_pct)} "
            f"({interval_text(*limits)}); replicated if the same within "
            f"±{magnitude_text(to_percent(region))} %: {need}"
        )


def _same_row(row: MetricRow, other: MetricRow) -> bool:
    return (row.case, row.metric) == (other.case, other.metric)


def _logs(limits: tuple[float, float]) -> Interval:
    return to_log_ratio(limits[0]), to_log_ratio(limits[1])


def _untested(pair: _Pair) -> ReplicationDecision:
    """Decide a row without a test: the author claims nothing, or values are computed."""
    word = ReplicationWord.not_decided
    effect = pair.one.comparison.effect_pct
    found = pair.other.comparison.effect_pct if pair.other is not None else None
    if pair.one.verdict.word == "computed" and effect is not None and effect > -100:
        if found is not None and found > -100 and pair.reason is None:
            word = _computed(effect, found, pair.author.data.criteria.margin_pct)
    elif pair.one.verdict.word not in CLAIMS:
        word = ReplicationWord.no_claim
    return ReplicationDecision(word, None, 1.0, 0.0)


def _computed(effect: float, found: float, margin_pct: float) -> ReplicationWord:
    author, reader = to_log_ratio(effect), to_log_ratio(found)
    if abs(reader - author) <= to_log_ratio(margin_pct):
        return ReplicationWord.replicated
    if abs(author) > SAME and author * reader > 0:
        return ReplicationWord.other_size
    return ReplicationWord.not_replicated


def _row(pair: _Pair, test: ReplicationRow | None, decision: ReplicationDecision) -> ReplicatedRow:
    row = ReplicatedRow(
        cell=pair.author.data.dir.name,
        case=pair.one.row.case,
        metric=pair.one.row.metric or "",
        unit=pair.one.row.unit or "",
        arm=pair.one.comparison.arm,
        author=_measured(pair.one, pair.author),
        reader=_measured(pair.other, pair.reader),
        verdict=decision.word.value,
        reason=pair.reason if decision.word is ReplicationWord.not_decided else None,
        ratio=_ratio(pair),
    )
    if test is None:
        return row
    low, high = decision.interval or (None, None)
    infinite = decision.more is not None and math.isinf(decision.more)
    reason = "the author's study is too short to tell" if infinite else row.reason
    seconds = _seconds(pair.reader)
    known = decision.more is not None and not infinite and seconds is not None
    return replace(
        row,
        change_pct=_percent(test.change.estimate),
        change_low_pct=_percent(low),
        change_high_pct=_percent(high),
        region_pct=_percent(decision.region),
        p_adjusted=round_significant(decision.p_adjusted),
        needed_s=(decision.more or 0.0) * (seconds or 0.0) if known else None,
        reason=reason,
    )


def _percent(log_ratio: float | None) -> float | None:
    return None if log_ratio is None else round_significant(to_percent(log_ratio))


def _ratio(pair: _Pair) -> float | None:
    """Return the reader's effect over the author's, both as log ratios; None if it says nothing."""
    effects = [one.comparison.effect_pct for one in (pair.one, pair.other) if one is not None]
    known = [to_log_ratio(effect) for effect in effects if effect is not None and effect > -100]
    if len(known) < 2 or abs(known[0]) <= SAME:
        return None
    return round_significant(known[1] / known[0])


def _measured(one: JudgedComparison | None, analysis: CellAnalysis | None) -> MeasuredEffect:
    if one is None or analysis is None:
        return MeasuredEffect()
    low, high = one.comparison.ci_pct or (None, None)
    return MeasuredEffect(
        round_significant(median_of(one.row, analysis.data.baseline)),
        round_significant(median_of(one.row, one.comparison.arm)),
        round_significant(one.comparison.effect_pct),
        round_significant(low),
        round_significant(high),
        one.verdict.word,
    )


def _seconds(analysis: CellAnalysis | None) -> float | None:
    """Return the wall seconds of a cell's processes, or None if unknown."""
    records = () if analysis is None else analysis.data.records
    spent = [record.seconds.get("process") for record in records if record.ok]
    known = [seconds for seconds in spent if seconds is not None]
    return sum(known) if known and len(known) == len(spent) else None


def replication_of(
    author: tuple[StudyPath, Sequence[CellAnalysis]],
    reader: tuple[StudyPath, Sequence[CellAnalysis]],
    changes: Sequence[str] = (),
    package_versions: str = "ours",
) -> Replication:
    """Return the replication of the author's study by the reader's.

    ``changes``: what the reader changed of the question. Raises as :func:`replicated_rows`.
    """
    rows, alpha = replicated_rows(author[1], reader[1])
    confirming = len(author[1]) - len(asked_cells(author[1]))
    note = f"the author's {confirming} cells in separate processes were not repeated"
    return Replication(
        schema_version=SCHEMA_VERSION,
        question=study_question(author[1]),
        author=_side(*author),
        reader=_side(*reader),
        alpha=alpha,
        package_versions=package_versions,
        changes=tuple(changes),
        differences=tuple(_differences(author[1], reader[1])),
        notes=(note,) if confirming else (),
        rows=rows,
    )


def _side(study: StudyPath, analyses: Sequence[CellAnalysis]) -> ReplicationSide:
    environment = next((a.environment for a in analyses if a.environment), {})
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
    """Yield what differs between the machines and their software, one text each."""
    old, new = (
        next((a.environment for a in analyses if a.environment), {})
        for analyses in (author, reader)
    )
    keys = (*MACHINE_FIELDS, "cores_usable", "os_release", "architecture", "python", "git")
    facts = [
        {key: one.get(key) for key in keys} | (one.get("versions") or {}) for one in (old, new)
    ]
    for key in dict.fromkeys([*facts[0], *facts[1]]):
        before, after = (_fact(key, one.get(key)) for one in facts)
        if before != after:
            yield f"{key.removesuffix('_bytes').replace('_', ' ')}: {before}, here {after}"
    designs = {a.data.dir.name: a.data.design.isolation for a in author}
    for name, isolation in ((a.data.dir.name, a.data.design.isolation) for a in reader):
        if designs.get(name, isolation) != isolation:
            yield f"design.isolation of {name}: {designs[name]}, here {isolation}"


def _fact(key: str, value: Any) -> str:
    if value is None:
        return "none"
    return f"{value / 2**30:.1f} GiB" if key == "memory_bytes" else str(value)[:40]
