"""Write the traced steps of a study: a file per run for Perfetto, and a page that plays them."""

from __future__ import annotations

import json
from pathlib import Path

from labkit.analysis.charts.step_player import (
    TracedRun,
    player_page,
    traced_records,
    traced_run,
)
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.exports.chrome_trace import chrome_trace
from labkit.analysis.number_format import slug
from labkit.analysis.pages.report_files import report_dir, write_text
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.records import RecordError, open_study


def write_traces(study: Path) -> list[Path]:
    """Write every traced run and the page, and return the paths of the files.

    Raises
    ------
    RecordError
        The study or a trace cannot be read, or no run was traced. Nothing has been written.
    """
    analyses = AnalysisCache().study(open_study(study))
    cells = {
        analysis.data.dir.name: runs for analysis in analyses if (runs := _traced_runs(analysis))
    }
    if not cells:
        raise RecordError(
            f"{study} has no traced steps; run its command with workload.step_trace=500 and "
            "another out="
        )
    texts = {
        f"{slug(cell)}--{slug(run.run)}.json": _export(cell, run)
        for cell, runs in cells.items()
        for run in runs
    }
    texts["steps.html"] = player_page(cells, study.stem)
    folder = report_dir(study) / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _traced_runs(analysis: CellAnalysis) -> list[TracedRun]:
    """Return a cell's traced runs, the baseline's first and the control's last."""
    arms = [arm.name for arm in analysis.cell.arms]
    records = traced_records(analysis.data.records, arms)
    return [traced_run(record, analysis.data.dir) for record in records]


def _export(cell: str, run: TracedRun) -> str:
    return json.dumps(chrome_trace(run.trace, f"{cell}, {run.run}"), separators=(",", ":"))
