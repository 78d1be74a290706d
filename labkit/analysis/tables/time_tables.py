"""The section "Why": where the time of steps went; of kernels, work and hardware counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from labkit.analysis.charts.step_player import TracedRun, traced_records, traced_run
from labkit.analysis.charts.waterfall_chart import waterfall_chart
from labkit.analysis.document.report_parts import (
    BulletList,
    CellSource,
    ChartPart,
    PageList,
    PictureFile,
    ReportPart,
    TablePart,
    section,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.time_text import clocks_text, time_sentences
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.time_model import (
    HOST,
    PART_NAMES,
    ArmTime,
    PartDifference,
    TimeDivision,
)
from labkit.analysis.number_format import interval_text, p_text, signed_text, slug, value_text
from labkit.records import Record

TRACED_NOTE = (
    "These runs had no clocks (an earlier version), so no cause is tested: means over the stored "
    "steps of each arm's first run (µs). The trace itself takes time."
)
MIN_CHANGE = 0.005  # smaller differences of counts are not worth a sentence


def time_table(cell: Cell, division: TimeDivision) -> Table[str]:
    """Return the parts' times per output token: the baseline's, and each arm's difference."""
    shares = {share.part: share for share in division.baseline}
    columns = [
        Column[str]("part of a step", lambda name: PART_NAMES.get(name, name), numeric=False),
        Column(
            f"{cell.baseline} (µs)",
            lambda name: shares[name].us if name in shares else division.total_us,
            value_text,
        ),
        Column("share (%)", lambda name: shares[name].pct if name in shares else 100.0, value_text),
    ]
    for arm in division.arms:
        if arm.arm in cell.compared_arms:
            columns += _arm_columns(arm)
    return Table(tuple(columns), (*shares, "total"), (clocks_text(division),))


def _arm_columns(arm: ArmTime) -> list[Column[str]]:
    parts = {one.part: one for one in (*arm.parts, arm.total)}

    def column(heading: str, text: Callable[[PartDifference], str]) -> Column[str]:
        return Column(heading, lambda name: text(parts[name]) if name in parts else "")

    return [
        column(f"{arm.arm} (µs)", lambda one: value_text(one.us)),
        column("difference (µs)", lambda one: signed_text(one.difference_us or 0.0)),
        column("interval", lambda one: interval_text(one.low_us, one.high_us)),
        column("adjusted p", lambda one: p_text(one.p_adjusted)),
    ]


@section("Why: where the time went")
def time_section(report: CellSource) -> Iterator[ReportPart]:
    """Show the first cause of each arm, the parts' times, and a waterfall for each arm.

    Of runs without clocks that stored their steps: the mean times of those.
    """
    cell, division = report.cell, report.cell.time
    if division is None:
        first: dict[str, Record] = {}
        for record in traced_records(report.records, cell.real_arms):
            first.setdefault(record.arm, record)
        runs = [traced_run(record, report.analysis.data.dir) for record in first.values()]
        yield from [TablePart(traced_time_table(runs))] if runs else []
        return
    sentences = list(time_sentences(cell, division))
    yield BulletList(sentences)
    yield PageList(sentences)
    yield TablePart(time_table(cell, division))
    for arm in division.arms:
        if arm.arm in cell.compared_arms:
            chart = ChartPart(
                waterfall_chart(cell.baseline, division, arm),
                f"From {cell.baseline}'s time per output token to {arm.arm}'s",
            )
            yield chart
            stem = cell.stem(f"why-{slug(arm.arm)}")
            yield PictureFile(stem, f"Where {arm.arm}'s time went", [chart])


def traced_time_table(runs: Sequence[TracedRun]) -> Table[TracedRun]:
    """Return the mean times of the parts of the steps that runs stored, a line per run."""
    means = {run.run: mean_times(run.trace["steps"]) for run in runs}

    def column(name: str, heading: str) -> Column[TracedRun]:
        return Column(heading, lambda run: value_text(means[run.run].get(name)))

    return Table(
        (
            Column[TracedRun]("arm", lambda run: run.arm, numeric=False),
            *(column(name, PART_NAMES[name]) for name in (*HOST, "model")),
            column("step", "whole step"),
        ),
        tuple(runs),
        (TRACED_NOTE,),
    )


def mean_times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean time of each part of stored steps, and of the whole ``step`` (us).

    In a trace, ``draft`` is within ``schedule``, and ``plan`` may be within the forward.
    """
    spans = [step["times_us"] for step in steps if "forward" in step["times_us"]]
    if not spans:
        return {}
    parts = []
    for times in spans:
        own = {name: times.get(name, (0, 0))[1] for name in (*HOST, "forward")}
        begin, model = times["forward"]
        within = begin <= times.get("plan", (-1, 0))[0] < begin + model
        own["schedule"] -= own["draft"]
        own["model"] = model - (own["plan"] if within else 0)
        ends = [start + duration for start, duration in times.values()]
        own["step"] = max(ends) - min(start for start, _ in times.values())
        parts.append(own)
    return {name: fmean(own[name] for own in parts) for name in parts[0]}


@section("Why: the work of a launch")
def launch_work_section(report: CellSource) -> Iterator[ReportPart]:
    """Show what differs between the arms' launches: their work, and hardware counters."""
    noted = [r for r in report.records if r.ok and r.known_notes.get("hardware")]
    if not noted:
        return
    sentences = [text for arm in report.cell.compared_arms for text in _work_texts(report, arm)]
    reasons = {reason for r in noted if (reason := r.known_notes["hardware"].get("unavailable"))}
    if reasons:
        sentences.append(f"No hardware counters: {'; '.join(sorted(reasons))}.")
    yield BulletList(sentences)
    yield PageList(sentences)


def _work_texts(report: CellSource, arm: str) -> Iterator[str]:
    """Yield a sentence for each case in which an arm's work differs from the baseline's."""
    counts = _launch_counts(report.records)
    for row in report.cell.primary_rows:
        base, own = (counts.get((row.case, name), {}) for name in (report.cell.baseline, arm))
        changes = {name: own[name] / base[name] - 1 for name in own if base.get(name)}
        found = [
            f"{signed_text(100 * change)} % {name.removeprefix('attention.').replace('_', ' ')}"
            for name, change in changes.items()
            if abs(change) > MIN_CHANGE
        ]
        comparison = row.comparison(arm)
        if found and comparison is not None and comparison.effect_pct is not None:
            time = f"{signed_text(comparison.effect_pct)} % time"
            yield f"{row.name}, {arm}: {', '.join(found)}; {time}."


def _launch_counts(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the counts of one launch by case and arm, each the median over the runs."""
    runs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record, case in ((r, c) for r in records for c in r.cases):
        counted = {
            n: v
            for n, v in (case.known_notes.get("counters") or {}).items()
            if n.startswith("attention.") and n != "attention.map_us"
        }
        counted |= (record.known_notes.get("hardware") or {}).get(case.case) or {}
        for name, value in counted.items():
            by_name = runs.setdefault((case.case, record.arm), {})
            by_name.setdefault(name, []).append(float(value))
    return {key: {n: median(v) for n, v in by_name.items()} for key, by_name in runs.items()}
