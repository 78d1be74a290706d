"""``python -m labkit.compare OLD NEW``: did an arm's effect change between two studies?

For CI. Both studies must have one machine and one config; the change of each arm's difference from
the baseline is compared. Exit codes: 0; 1 if ``--fail-on`` is met; 2, with one line, if the studies
cannot be compared or ``--fail-on`` could never be met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli_errors import OneLineParser, print_error
from labkit.records import RecordError

if TYPE_CHECKING:
    from labkit.analysis.study_diff import StudyComparison

FAIL_ON = ("slower", "faster", "invalid", "inconclusive")


def margin(text: str) -> float:
    """Parse ``2%`` or ``2`` as percent, above 0 and at most 50."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 50:
        raise argparse.ArgumentTypeError(f"{text}: allowed are above 0 to 50 (percent)")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.study_analysis import AnalysisCache
    from labkit.analysis.study_diff import StudiesNotComparable, compare_studies

    parser = OneLineParser(
        prog="python -m labkit.compare",
        description="Tell whether an arm's lead over its baseline changed between two studies.",
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="a study's folder")
    parser.add_argument("new", type=Path, metavar="NEW", help="a later study's folder")
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=FAIL_ON,
        help="exit 1 if a row has this verdict (may be given more than once)",
    )
    parser.add_argument(
        "--margin",
        type=margin,
        default=2.0,
        metavar="PCT",
        help="differences below it do not matter (percent; default 2%%)",
    )
    options = parser.parse_args(argv)
    analysis_cache = AnalysisCache()
    try:
        found = compare_studies(
            analysis_cache.study(options.old), analysis_cache.study(options.new), options.margin
        )
    except (RecordError, StudiesNotComparable, OSError) as error:
        return print_error(parser.prog, error)
    except KeyboardInterrupt:
        return 130
    _print(found)
    met = any(change.verdict.word in options.fail_on for change in found.changes)
    if options.fail_on and not met and not found.decidable:
        return print_error(parser.prog, "nothing is comparable in time, so --fail-on can't be met")
    return int(met)


def _print(found: StudyComparison) -> None:
    from rich.console import Console

    from labkit.analysis.rendering.terminal_report import print_changes

    print_changes(found, Console())


if __name__ == "__main__":
    sys.exit(main())
