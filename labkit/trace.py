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
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.program import Program
from labkit.records import RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.pages.trace_files import write_traces

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


if __name__ == "__main__":
    sys.exit(main())
