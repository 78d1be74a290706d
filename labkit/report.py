"""``python -m labkit.report DIR``: rebuild a study's tables and plots from its records.

If DIR is an archive, ``STUDY.zip``, the files are written beside it, into ``STUDY.report``. If DIR
is a folder of studies, the program writes an index page of their questions, answers, dates and
machines; the files ``replication.json`` in such a folder become a table of who replicated what.
``--format X`` prints that format and writes nothing. Exit codes: 0 on success; 2, with a one-line
message, if the study cannot be read or lacks data that the format needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli.program_base import Program, print_notes
from labkit.records import RecordError

if TYPE_CHECKING:
    from labkit.analysis.studies.study_analysis import AnalysisCache


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.pages.replication_page import replication_files, write_replications
    from labkit.analysis.pages.report_files import FORMATS, FormatError, render
    from labkit.analysis.studies.study_analysis import MAX_RECORDS, AnalysisCache
    from labkit.analysis.studies.study_discovery import holds_studies

    parser = Program(
        prog="python -m labkit.report",
        description="Rebuild every table, plot and report of a study from its records.",
    )
    parser.add_argument(
        "dir",
        type=Path,
        metavar="DIR",
        help="folder or archive of a study, or the folder of a cell or of several studies",
    )
    parser.add_argument("--format", choices=FORMATS, help="print this format and write nothing")

    def body(options: argparse.Namespace) -> None:
        analysis_cache = AnalysisCache(MAX_RECORDS)
        several = holds_studies(options.dir)
        sent_back = options.format is None and replication_files(options.dir)
        if sent_back:
            print(write_replications(options.dir))
        if several:
            _index(options.dir, options.format)
        elif options.format is not None:
            print(render(options.dir, options.format, analysis_cache), end="")
        elif not sent_back:
            _rebuild(options.dir, analysis_cache)
        print_notes(parser.prog, analysis_cache.notes())

    return parser.run(argv, body, refused=(RecordError, FormatError))


def _index(folder: Path, format_name: str | None) -> None:
    from labkit.analysis.pages.index_page import render_index, write_index

    if format_name is not None:
        print(render_index(folder, format_name), end="")
    else:
        print(write_index(folder))


def _rebuild(folder: Path, analysis_cache: AnalysisCache) -> None:
    from labkit.analysis.pages.report_files import report_dir, write_study
    from labkit.config import count_text
    from labkit.machine.worker_environment import core_count

    study = write_study(folder, analysis_cache=analysis_cache, processes=core_count())
    cells = count_text(len(study.cells), "cell")
    runs = count_text(sum(cell.runs for cell in study.cells), "run")
    reports = report_dir(folder)
    print(f"{cells}, {runs}: {reports / 'report.md'} and {reports / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
