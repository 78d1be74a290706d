"""``python -m labkit.history DIR METRIC``: a metric over weeks and commits, with change points.

DIR is a folder of studies and archives. The program reads the studies' records, and writes
``history-METRIC.md`` and ``history-METRIC.html`` into DIR. Exit codes: 0 on success, with or
without change points; 2, with a one-line message, if a study cannot be read or no study has the
metric.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.program_base import Program
from labkit.records import RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.pages.history_page import write_history

    parser = Program(
        prog="python -m labkit.history",
        description="Show a metric over all studies in a folder, and where its level changed.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of studies, or one study")
    parser.add_argument("metric", metavar="METRIC", help="name of a metric, such as total_tok_s")

    def body(options: argparse.Namespace) -> None:
        page = write_history(options.dir, options.metric)
        for sentence in page.changes:
            print(sentence)
        print(f"{page.summary}: {page.path}")

    return parser.run(argv, body, refused=(RecordError,))


if __name__ == "__main__":
    sys.exit(main())
