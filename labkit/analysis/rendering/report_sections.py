"""The sections of a cell's report, in the order of the Markdown and of the HTML report.

Most sections are declared in the module of the table or chart that they show. The sections that
combine several tables or charts, or show no table or chart, are declared here.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.analysis.number_format import count_text
from labkit.analysis.quality_answer import quality_phrases
from labkit.analysis.rendering import html_charts
from labkit.analysis.rendering.cell_report_content import CellReport
from labkit.analysis.rendering.counter_tables import (
    dispatch_section,
    engine_counters_section,
    launch_queue_section,
    roofline_section,
)
from labkit.analysis.rendering.hit_and_acceptance_table import hit_and_acceptance_section
from labkit.analysis.rendering.http_stream_tables import http_section
from labkit.analysis.rendering.kv_utilization import kv_utilization_section
from labkit.analysis.rendering.map_build_times_table import host_times_section
from labkit.analysis.rendering.matplotlib_figures import case_names, case_stem, run_positions
from labkit.analysis.rendering.medians_table import medians_section
from labkit.analysis.rendering.memory_timeline_chart import memory_timeline_section
from labkit.analysis.rendering.output_agreement_table import outputs_section
from labkit.analysis.rendering.published_table import published_section
from labkit.analysis.rendering.report_parts import (
    BulletList,
    ChartPart,
    Part,
    Parts,
    PictureFile,
    Prose,
    RunList,
    section,
    table_parts,
)
from labkit.analysis.rendering.request_outcome_tables import request_outcomes_section
from labkit.analysis.rendering.sensitivity_analyses_and_failed_runs_tables import (
    failures_section,
    sensitivity_table,
)
from labkit.analysis.rendering.step_player import step_player_section
from labkit.analysis.rendering.sweep_tables import curves_section
from labkit.analysis.rendering.text_quality_tables import quality_section
from labkit.analysis.rendering.video_tables import (
    clip_work_section,
    decode_times_section,
    picked_frames_section,
    visible_events_section,
)
from labkit.analysis.verdict_sentences import row_name, verdict_sentence, verdict_sentences

NOISE_TITLE = "Machine noise"
SENSITIVITY_TITLE = "Sensitivity to machine noise"


@section("How it was measured")
def _design(report: CellReport) -> Parts:
    design = report.cell["design"]
    line = (
        f"Cell `{report.name}`: {count_text(design['blocks'], 'block')} of "
        f"{count_text(design['runs_per_block'], 'run')} "
        f"of each arm, seed {design.get('seed')}, margin ±{design['margin_pct']:g} %, "
        f"alpha {design['alpha']:g}. Gates: {report.gates}."
    )
    return [Prose([line]), Prose(report.machine)]


@section("Verdicts by row")
def _row_by_row(report: CellReport) -> Parts:
    data = report.analysis.data
    sentences = verdict_sentences(report.cell, data.arms[0].identity, quality_phrases(data))
    return [BulletList(sentences)] if sentences else []


@section("Effects")
def _effects(report: CellReport) -> Parts:
    svg = html_charts.effects_chart(report.cell)
    return [report.legend, ChartPart(svg)] if svg is not None else []


@section("Other metrics")
def _other_metrics(report: CellReport) -> Parts:
    return table_parts(report.secondary_results)


@section("Latencies")
def _latencies(report: CellReport) -> Parts:
    extent = "all requests of all runs; the slowest 0.5 % beyond the right edge"
    charts = [
        ChartPart(svg, f"{name}, {extent}")
        for name, svg in html_charts.latency_charts(report.analysis)
    ]
    return [report.legend, *charts] if charts else []


@section("Runs in order")
def _runs_in_order(report: CellReport) -> Iterator[Part]:
    cell, order = report.cell, run_positions(report.cell)
    yield report.legend
    for row in cell["rows"]:
        if row["primary"]:
            svg = html_charts.runs_chart(cell, row, order, report.record_folder)
            if svg is not None:
                caption = f"{row_name(row)}; lines are medians, dots link to records"
                yield ChartPart(svg, caption)
    for case in case_names(cell):
        yield PictureFile(case_stem(cell, case), case)


@section("Drift and probe")
def _drift(report: CellReport) -> Parts:
    svg = html_charts.drift_chart(report.analysis)
    caption = (
        "Deviations of runs from their arm's median (solid, mean of the primary rows) and the "
        "arm-blind probe of the machine (dashed)"
    )
    return [ChartPart(svg, caption)] if svg is not None else []


@section(NOISE_TITLE)
def _noise(report: CellReport) -> Parts:
    return [Prose(report.noise)] if report.noise else []


@section(NOISE_TITLE)
def _noise_alone(report: CellReport) -> Parts:
    """Show the noise if there is no sensitivity section, which would include the noise."""
    return [] if report.sensitivity else _noise.parts(report)


@section(SENSITIVITY_TITLE)
def _sensitivity(report: CellReport) -> Parts:
    return table_parts(sensitivity_table(report.cell, report.sensitivity))


@section(SENSITIVITY_TITLE)
def _noise_and_sensitivity(report: CellReport) -> Parts:
    if not report.sensitivity:
        return []
    return [*_noise.parts(report), *_sensitivity.parts(report)]


@section("Runs behind each number")
def _runs(report: CellReport) -> Parts:
    cell, claim = report.cell, report.analysis.data.arms[0].identity
    sentences = [
        [verdict_sentence(cell, row, comparison, claim) for comparison in row["comparisons"]]
        for row in cell["rows"]
    ]
    return [RunList(cell["rows"], sentences)]


WORK_SECTIONS = (
    quality_section,
    dispatch_section,
    engine_counters_section,
    hit_and_acceptance_section,
    kv_utilization_section,
    request_outcomes_section,
    http_section,
    decode_times_section,
    clip_work_section,
    picked_frames_section,
    visible_events_section,
    published_section,
    launch_queue_section,
    host_times_section,
    roofline_section,
)
MARKDOWN_SECTIONS = (
    curves_section,
    _design,
    _row_by_row,
    _other_metrics,
    *WORK_SECTIONS,
    outputs_section,
    medians_section,
    _noise_alone,
    _noise_and_sensitivity,
    _runs_in_order,
    memory_timeline_section,
    failures_section,
)
HTML_SECTIONS = (
    curves_section,
    _effects,
    _other_metrics,
    *WORK_SECTIONS,
    _latencies,
    memory_timeline_section,
    step_player_section,
    _runs_in_order,
    _drift,
    _noise,
    _sensitivity,
    outputs_section,
    failures_section,
    medians_section,
    _runs,
)
