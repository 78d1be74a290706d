"""``python -m labkit.trace STUDY``: the traced steps of a study, for Perfetto and as a player.

STUDY is the folder or the archive of a study that ran with ``workload.step_trace``. The program
writes one file per traced run, ``traces/CELL--RUN.json``, and one page for all of them,
``traces/steps.html``, which plays the steps. The JSON files are in Chrome's trace-event format;
https://ui.perfetto.dev and ``chrome://tracing`` open them. If STUDY is an archive, the files are
written beside it, into ``STUDY.report``. Exit codes: 0 on success; 2, with a one-line message, if
the study cannot be read or no run was traced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.program_base import Program
from labkit.records import RecordError, open_study


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Program(
        prog="python -m labkit.trace",
        description="Export the traced steps of a study for Perfetto, and as a page that plays "
        "them.",
    )
    parser.add_argument("study", type=Path, metavar="STUDY", help="folder or archive of a study")

    def body(options: argparse.Namespace) -> None:
        for path in write_traces(options.study):
            print(path)

    return parser.run(argv, body, refused=(RecordError,))


def write_traces(study: Path) -> list[Path]:
    """Write every traced run and the page, and return the paths of the files.

    Raises ``RecordError`` if the study or a trace cannot be read, or no run was traced. Nothing has
    been written.
    """
    from labkit.analysis.charts.step_player import player_page, traced_records, traced_run
    from labkit.analysis.exports.chrome_trace import chrome_trace
    from labkit.analysis.pages.report_files import report_dir, write_text
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.analysis.text_format import slug

    cells = {}
    for analysis in AnalysisCache().study(open_study(study)):
        folder, arms = analysis.data.dir, [arm.name for arm in analysis.cell.arms]
        if runs := [traced_run(r, folder) for r in traced_records(analysis.data.records, arms)]:
            cells[folder.name] = runs
    if not cells:
        raise RecordError(
            f"{study} has no traced steps; run its command with workload.step_trace=500 and "
            "another out="
        )
    texts = {
        f"{slug(cell)}--{slug(run.run)}.json": json.dumps(
            chrome_trace(run.trace, f"{cell}, {run.run}"), separators=(",", ":")
        )
        for cell, runs in cells.items()
        for run in runs
    }
    texts["steps.html"] = player_page(cells, study.stem)
    traces = report_dir(study) / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(traces / name, text)
    return [traces / name for name in texts]


if __name__ == "__main__":
    sys.exit(main())
