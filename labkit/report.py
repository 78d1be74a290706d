"""``python -m labkit.report DIR``: rebuild a study's tables and plots from its records.

``--format X`` prints that format and writes nothing. Exit codes: 0 on success; 2, with a one-line
message, if the study cannot be read or lacks data that the format needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli_errors import OneLineParser, print_error, print_notes
from labkit.records import RecordError

if TYPE_CHECKING:
    from labkit.analysis.study_analysis import AnalysisCache


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.rendering.report_files import FORMATS, FormatError, render
    from labkit.analysis.study_analysis import AnalysisCache

    parser = OneLineParser(
        prog="python -m labkit.report",
        description="Rebuild every table, plot and report of a study from its records.",
    )
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="folder of a study, or of one of its cells"
    )
    parser.add_argument("--format", choices=FORMATS, help="print this format and write nothing")
    options, analysis_cache = parser.parse_args(argv), AnalysisCache()
    try:
        if options.format is not None:
            _print(render(options.dir, options.format, analysis_cache))
        else:
            _rebuild(options.dir, analysis_cache)
    except (RecordError, FormatError, OSError) as error:
        return print_error(parser.prog, error)
    except KeyboardInterrupt:
        return 130
    print_notes(parser.prog, analysis_cache.notes())
    return 0


def _print(text: str) -> None:
    """Print text as UTF-8 in every locale. A closed pipe is not an error."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _rebuild(folder: Path, analysis_cache: AnalysisCache) -> None:
    from labkit.analysis.number_format import count_text
    from labkit.analysis.rendering.report_files import write_study

    analyses = write_study(folder, analysis_cache=analysis_cache)
    cells = count_text(len(analyses), "cell")
    runs = count_text(sum(len(analysis.data.records) for analysis in analyses), "run")
    print(f"{cells}, {runs}: {folder / 'report.md'} and {folder / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
