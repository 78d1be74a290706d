"""Rows of two metrics of one case: every section of a report tells them apart."""

from dataclasses import replace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts.run_and_effect_charts import effects_chart
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.chart import Dots
from labkit.analysis.document.report_parts import RowCharts
from labkit.analysis.findings.verdict_sentences import control_sentence, verdict_sentences
from labkit.analysis.model.result_row import row_name
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.report_sections import HTML_CHAPTERS, sensitivity_table
from labkit.analysis.robustness.sensitivity_analysis import SensitivityResult
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.analysis.tables.kernel_launch_tables import launch_work_section

CASES = "decode, 64 reqs, ctx 128", "prefill, 8 × 512"
METRICS = "dispatch_us", "single_dispatch_us"
NAMES = [f"{case}: {metric}" for case in CASES for metric in METRICS]


def with_second_metric(record):
    cases = tuple(
        replace(c, metrics=(*c.metrics, *(replace(m, name=METRICS[1]) for m in c.metrics)))
        for c in record.cases
    )
    return replace(record, cases=cases)


@pytest.fixture
def cell_dir(make_cell):
    return make_cell(change=with_second_metric)


@pytest.fixture
def report(cell_dir):
    return CellReport(analyse(cell_dir))


@pytest.mark.parametrize(
    ("case", "metric", "num_metrics", "name"),
    [
        ("decode", "dispatch_us", 1, "decode"),
        ("decode", "dispatch_us", 2, "decode: dispatch_us"),
        ("all", "dispatch_us", 1, "dispatch_us"),
        ("all", "dispatch_us", 2, "dispatch_us"),
        ("decode", None, 2, "decode"),
    ],
)
def test_a_row_is_named_by_its_case_or_metric_or_both(case, metric, num_metrics, name):
    rows = [{"case": case, "metric": METRICS[i], "primary": True} for i in range(num_metrics)]
    cell = planted_cell([*rows, {"case": case, "metric": "map_us"}])
    row = replace(cell.rows[0], metric=metric)
    assert cell.row_name(row) == name == row_name(row, METRICS[:num_metrics])


def test_the_chart_of_effects_names_each_row(report):
    chart = effects_chart(report.cell)
    tips = [tip for mark in chart.marks if isinstance(mark, Dots) for tip in mark.tips]
    assert chart.rows == tuple(NAMES)
    assert [sum(tip.startswith(f"{name}, ") for tip in tips) for name in NAMES] == [2] * 4


def test_every_choice_of_a_row_s_chart_is_another(report):
    sections = {one.title: one for chapter in HTML_CHAPTERS for one in chapter.sections}
    for title in ("Differences by block", "Runs in order"):
        (part,) = (p for p in sections[title].parts(report) if isinstance(p, RowCharts))
        assert [name for _, name in part.rows] == NAMES
        for name, one in zip(NAMES, part.parts, strict=True):
            assert one.caption.startswith(name) and one.chart.title.endswith(f" of {name}")


def test_sentences_and_tables_name_each_row(report, cell_dir):
    cell = report.cell
    sentences = [line for line in verdict_sentences(cell, "bitwise") if ": seq_map" in line]
    assert all(map(str.startswith, sentences, NAMES)) and len(sentences) == 4
    assert any(f"({name})" in control_sentence(cell) for name in NAMES)
    results = [SensitivityResult(i, "seq_map", "how", 1.0, None, 0.5, 4) for i in range(4)]
    table = sensitivity_table(cell, results)
    assert [table.cells(line)[0] for line in table.lines] == NAMES
    decided = AnalysisCache().decided_rows(cell_dir, CASES)
    assert [line["row"] for line in decided] == NAMES


def test_the_work_of_a_launch_is_that_of_a_named_row(make_cell):
    def with_hardware(record):
        notes = {**record.notes, "hardware": {"unavailable": "no perf"}}
        return replace(with_second_metric(record), notes=notes)

    report = CellReport(analyse(make_cell(change=with_hardware)))
    (sentences,) = launch_work_section.parts(report)
    assert all(map(str.startswith, sentences.lines, NAMES)) and len(sentences.lines) == 5
