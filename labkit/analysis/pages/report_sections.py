"""The sections of a cell's report: the Markdown report's list, and the HTML page's chapters.

Most sections are declared in the module of the table or chart that they show. The sections that
combine several tables or charts, or show no table or chart, are declared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.analysis.charts import run_and_effect_charts
from labkit.analysis.charts.latency_distribution_chart import latency_charts
from labkit.analysis.charts.latency_throughput_chart import frontier_section
from labkit.analysis.charts.memory_and_request_timelines import (
    kv_utilization_section,
    memory_timeline_section,
    request_timeline_section,
)
from labkit.analysis.charts.step_player import step_player_section
from labkit.analysis.comparison.observations import MetricRow
from labkit.analysis.document.report_parts import (
    BulletList,
    Chapter,
    ChartPart,
    Parts,
    PictureFile,
    Prose,
    ReportPart,
    RowCharts,
    Section,
    section,
    table_parts,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.output_quality_sentences import quality_phrases
from labkit.analysis.findings.verdict_sentences import verdict_sentences
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import interval_text, p_text, percent_text
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.robustness.sensitivity_analysis import SensitivityResult
from labkit.analysis.tables.engine_counter_tables import WORK_SECTIONS
from labkit.analysis.tables.kernel_launch_tables import HOST_SECTIONS, launch_work_section
from labkit.analysis.tables.load_test_diagnostics import http_section, request_outcomes_section
from labkit.analysis.tables.metrics_by_arm import matrix_section
from labkit.analysis.tables.perplexity_and_kl_tables import quality_section
from labkit.analysis.tables.published_vs_measured import published_section
from labkit.analysis.tables.results_table import medians_section
from labkit.analysis.tables.step_time_breakdown import time_section
from labkit.analysis.tables.sweep_tables import curves_section
from labkit.analysis.tables.validity_tables import (
    failures_section,
    gates_section,
    outputs_section,
    runs_section,
)
from labkit.analysis.tables.video_tables import VIDEO_SECTIONS
from labkit.analysis.text_format import distinct_slugs
from labkit.config import count_text


@section("How it was measured")
def _design(report: CellReport) -> Parts:
    line = f"Cell `{report.cell.name}`: {_design_line(report)} Gates: {report.gates}."
    return [Prose([line]), Prose(report.machine)]


@section("How it was measured")
def _measured(report: CellReport) -> Parts:
    return [Prose([f"Cell {report.cell.name}: {_design_line(report)}", *report.machine])]


def _design_line(report: CellReport) -> str:
    design = report.cell.design
    seed = "" if design.seed is None else f"seed {design.seed}, "
    blocks, runs = count_text(design.blocks, "block"), count_text(design.runs_per_block, "run")
    size = f"{blocks} of {runs} of each arm"
    return f"{size}, {seed}margin ±{design.margin_pct:g} %, alpha {design.alpha:g}."


@section("Verdicts by row")
def _row_by_row(report: CellReport) -> Parts:
    data = report.analysis.data
    sentences = verdict_sentences(report.cell, data.arms[0].identity, quality_phrases(data))
    return [BulletList(sentences)] if sentences else []


@section("Tests by row")
def _tests(report: CellReport) -> Parts:
    notes = [Prose(report.notes)] if report.notes else []
    return [*table_parts(report.results, report.secondary_results), *notes]


@section("Differences by block")
def _pairs(report: CellReport) -> Parts:
    cell, data = report.cell, report.analysis.data
    shown, parts = [], []
    for index, (row, metric_row) in enumerate(zip(cell.rows, report.analysis.rows, strict=True)):
        if row.primary and row.skipped is None:
            chart = run_and_effect_charts.pairs_chart(cell, row, metric_row)
            if chart is not None:
                shown.append((index, cell.row_name(row)))
                parts.append(ChartPart(chart, _pairs_caption(cell, metric_row, data.criteria.runs)))
    return [RowCharts(shown, parts)] if parts else []


def _pairs_caption(cell: Cell, row: MetricRow, runs: int) -> str:
    baseline = cell.baseline
    arms = [*cell.real_arms[1:], *filter(None, [cell.control])]
    charts = run_and_effect_charts
    pairs = ((arm, charts.paired_differences(row, arm, baseline, runs)) for arm in arms)
    sentences = (charts.variation_sentence(row, baseline, arm, of.values()) for arm, of in pairs)
    return f"{cell.row_name(row)}: {next(filter(None, sentences), 'differences within blocks')}"


@section("Runs in order")
def _runs_in_order(report: CellReport) -> Iterator[ReportPart]:
    cell = report.cell
    shown, parts, by_case = [], [], dict[str, list[ChartPart]]()
    for index, row in enumerate(cell.rows):
        chart = run_and_effect_charts.runs_chart(cell, row, report.record_folder)
        if chart is not None:
            name = cell.row_name(row)
            part = ChartPart(chart, f"{name}; lines are medians, dots link to records")
            by_case.setdefault(row.case, []).append(part)
            if row.primary:
                shown.append((index, name))
                parts.append(part)
    if parts:
        yield RowCharts(shown, parts)
    for case, stem in distinct_slugs(by_case).items():
        yield PictureFile(cell.stem(stem), case, by_case[case], min(3, len(by_case[case])))


@section("Drift and probe")
def _drift(report: CellReport) -> Parts:
    chart = run_and_effect_charts.drift_chart(report.analysis)
    caption = (
        "Deviations of runs from their arm's median (mean of the primary rows) and the "
        "arm-blind probe of the machine"
    )
    keys = (("runs", "line series0", "line"), ("probe", "line dashed series1", "line"))
    return [ChartPart(chart, caption, keys)] if chart is not None else []


def sensitivity_table(cell: Cell, results: Sequence[SensitivityResult]) -> Table[SensitivityResult]:
    """Return one line per sensitivity analysis of a row and arm."""
    columns: tuple[Column[SensitivityResult], ...] = (
        Column("row", lambda result: cell.row_name(cell.rows[result.row]), numeric=False),
        Column("arm", lambda result: result.arm, numeric=False),
        Column("analysis", lambda result: result.how, numeric=False),
        Column("delta", lambda result: result.effect_pct, percent_text),
        Column("unadjusted CI (%)", lambda result: interval_text(*(result.ci_pct or (None, None)))),
        Column("unadjusted p", lambda result: result.p, p_text),
        Column("blocks", lambda result: result.blocks),
    )
    note = (
        "Each analysis tests one row by itself: neither p nor interval is adjusted for the other "
        "rows or arms. The numbers above are not these, but a verdict is withheld where stalls or "
        "the mean of all launches contradict it."
    )
    return Table(columns, tuple(results), (note,), prose=True)


def _noise_parts(report: CellReport) -> Parts:
    return [Prose(report.noise)] if report.noise else []


def _sensitivity_parts(report: CellReport) -> Parts:
    return table_parts(sensitivity_table(report.cell, report.sensitivity))


@section("Sensitivity to machine noise")
def _noise_and_sensitivity(report: CellReport) -> Parts:
    return [*_noise_parts(report), *_sensitivity_parts(report)] if report.sensitivity else []


@section("Machine noise")
def _noise_alone(report: CellReport) -> Parts:
    return [] if report.sensitivity else _noise_parts(report)


@section("For the record")
def _for_the_record(report: CellReport) -> Parts:
    lines = report.caveats.for_the_record
    return [BulletList(lines)] if lines else []


MARKDOWN_SECTIONS = (
    curves_section,
    run_and_effect_charts.effects_section,
    _design,
    _row_by_row,
    Section("Other metrics", lambda report: table_parts(report.secondary_results)),
    time_section,
    launch_work_section,
    quality_section,
    *WORK_SECTIONS,
    kv_utilization_section,
    request_outcomes_section,
    http_section,
    *VIDEO_SECTIONS,
    published_section,
    *HOST_SECTIONS,
    outputs_section,
    medians_section,
    _noise_alone,
    _noise_and_sensitivity,
    _runs_in_order,
    memory_timeline_section,
    failures_section,
)
HTML_CHAPTERS = (
    Chapter(
        "Metrics",
        (
            curves_section,
            run_and_effect_charts.effects_section,
            matrix_section,
            frontier_section,
            time_section,
            launch_work_section,
            published_section,
            quality_section,
        ),
        (*WORK_SECTIONS, *VIDEO_SECTIONS, *HOST_SECTIONS),
        is_open=True,
    ),
    Chapter(
        "Latency",
        (
            Section(
                "Latencies",
                lambda report: [ChartPart(c, text) for text, c in latency_charts(report.analysis)],
            ),
            request_timeline_section,
            step_player_section,
            request_outcomes_section,
            http_section,
        ),
    ),
    Chapter("Memory", (kv_utilization_section, memory_timeline_section)),
    Chapter("Runs", (_pairs, _runs_in_order, _drift), (medians_section, runs_section)),
    Chapter(
        "Trust",
        (
            gates_section,
            _for_the_record,
            _measured,
            Section("Machine noise", _noise_parts),
            Section("Sensitivity to machine noise", _sensitivity_parts),
            outputs_section,
            failures_section,
            _tests,
        ),
    ),
)
