"""``report.html``: the whole study as one file that fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.analysis.agreement import confirmation_sentence
from labkit.analysis.answer import answer
from labkit.analysis.cell import CellAnalysis
from labkit.analysis.charts import arm_classes, drift, forest, latency_cdfs, runs_in_order
from labkit.analysis.engine_table import engine_table
from labkit.analysis.kernel_tables import counters_table, queue_table, roofline_table
from labkit.analysis.markdown import SECONDS, cost_lines, environment_line, noise_lines
from labkit.analysis.numbers import count, interval_text, p_text, percent_text
from labkit.analysis.plots import run_positions
from labkit.analysis.roofline import points
from labkit.analysis.roofline_plot import roofline_chart
from labkit.analysis.sensitivity import Second, second_analyses
from labkit.analysis.sentences import control_sentence, real_arms, row_name, sentence
from labkit.analysis.svg import mark_svg
from labkit.analysis.table import (
    agreement_table,
    cell_table,
    host_table,
    output_unit,
    published_table,
)
from labkit.analysis.timeline import SERIES, Timeline, timelines
from labkit.analysis.timeline_plot import line_style, timeline_charts
from labkit.analysis.weakness import weaknesses

TEMPLATES = Path(__file__).parent / "templates"


def study_html(study: Mapping[str, Any], analyses: Sequence[CellAnalysis], study_dir: Path) -> str:
    """Give the report; links to records are relative to ``study_dir``."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        study=study,
        count=count,
        seconds_note=SECONDS,
        cells=[_cell(a, study_dir) for a in analyses],
    )


def _cell(analysis: CellAnalysis, study_dir: Path) -> dict[str, Any]:
    cell, data = analysis.json, analysis.data
    folder = "" if data.dir == study_dir else f"{data.dir.name}/"
    return {
        "json": cell,
        "folder": folder,
        "machine": " ".join([environment_line(cell["environment"]), *cost_lines(data.records)]),
        "weak": weaknesses(analysis),
        "table": cell_table(cell, data.records),
        "secondary": cell_table(cell, data.records, primary=False),
        "published": published_table(cell),
        "queued": queue_table(cell, data.records),
        "host": host_table(cell, data.records),
        "counted": counters_table(cell, data.records),
        "engine": engine_table(cell),
        "roofline": roofline_table(cell, data.records),
        "roof": roofline_chart(cell, points(cell, data.records)),
        "answer": answer(analysis),
        "control": control_sentence(cell),
        "confirmed": confirmation_sentence(analysis),
        "said": _said(cell, data.arms[0].identity),
        "legend": [
            (arm, mark_svg(mark, style)) for arm, (style, mark) in arm_classes(cell).items()
        ],
        "forest": forest(cell),
        "cdfs": list(latency_cdfs(analysis)),
        "runs": list(_runs(cell, folder)),
        "drift": drift(analysis),
        "noise": noise_lines(analysis),
        "timelines": [_shown(t) for t in timelines(data.records, real_arms(cell))],
        "seconds": [_second(second, cell) for second in second_analyses(analysis)],
        "agreement": agreement_table(analysis.identity, output_unit(cell)),
    }


def _said(cell: Mapping[str, Any], claim: str) -> list[list[str]]:
    """Return every row's sentences, arm by arm: they stand in the details of the row."""
    return [[sentence(cell, row, c, claim) for c in row["comparisons"]] for row in cell["rows"]]


def _runs(cell: Mapping[str, Any], folder: str) -> Iterable[tuple[str, str]]:
    order = run_positions(cell)
    for row in cell["rows"]:
        chart = runs_in_order(cell, row, order, folder) if row["primary"] else None
        if chart is not None:
            yield row_name(row), chart


def _shown(timeline: Timeline) -> dict[str, Any]:
    memory, phases = timeline_charts(timeline)
    return {
        "caption": timeline.caption(),
        "memory": memory,
        "phases": phases,
        "lines": [(SERIES[name], line_style(name)) for name in timeline.memory],
        "bars": timeline.phases,
    }


def _second(second: Second, cell: Mapping[str, Any]) -> list[str]:
    low, high = second.ci_pct or (None, None)
    return [
        row_name(cell["rows"][second.row]),
        second.arm,
        second.how,
        percent_text(second.effect_pct),
        interval_text(low, high),
        p_text(second.p),
        str(second.blocks),
    ]
