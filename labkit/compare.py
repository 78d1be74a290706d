"""``python -m labkit.compare OLD NEW...``: test whether arms' effects changed between studies.

The program is meant for CI. The studies must be of the same machine and the same config. Each arm
has a difference from the baseline; the program tests whether this difference changed between OLD
and each NEW. The p-values are adjusted over all of these tests. Exit codes: 0 on success; 1 if a
row has a verdict that ``--fail-on`` names; 2, with a one-line message, if the studies cannot be
compared, or if ``--fail-on`` is given and no row can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli.program_base import Program, print_notes
from labkit.records import OLDER_VERDICTS, RecordError, open_study

if TYPE_CHECKING:
    from labkit.analysis.studies.between_study_comparison import StudyComparison

FAIL_ON = ("worse", "better", "invalid", "inconclusive")


def margin(text: str) -> float:
    """Parse a percentage above 0 and at most 50, written as ``2%`` or ``2``."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 50:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 50 (percent)")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.studies.between_study_comparison import StudiesNotComparable

    parser = Program(
        prog="python -m labkit.compare",
        description="Test whether arms' differences from the baseline changed between studies.",
    )
    parser.add_argument(
        "old", type=Path, metavar="OLD", help="folder or archive of the earlier study"
    )
    parser.add_argument(
        "new",
        type=Path,
        nargs="+",
        metavar="NEW",
        help="folder or archive of a later study (one or more)",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        type=lambda text: OLDER_VERDICTS.get(text, text),  # ``worse`` was ``slower``
        choices=FAIL_ON,
        help="exit 1 if a row has this verdict (may be given more than once)",
    )
    parser.add_argument(
        "--margin",
        type=margin,
        default=2.0,
        metavar="PCT",
        help="changes smaller than this do not matter (percent; default 2%%)",
    )
    return parser.run(argv, _compare, refused=(RecordError, StudiesNotComparable))


def _compare(options: argparse.Namespace) -> int:
    from labkit.analysis.studies.between_study_comparison import (
        StudiesNotComparable,
        compare_with_first,
    )
    from labkit.analysis.studies.study_analysis import MAX_RECORDS, AnalysisCache

    analysis_cache = AnalysisCache(MAX_RECORDS)
    old = analysis_cache.lazily(open_study(options.old))
    later = [analysis_cache.lazily(open_study(new)) for new in options.new]
    comparisons = compare_with_first(old, later, options.margin)
    print_notes("labkit.compare", analysis_cache.notes())
    _print(options.old, options.new, comparisons)
    changes = [change for comparison in comparisons for change in comparison.changes]
    failed = any(change.comparison.verdict in options.fail_on for change in changes)
    undecidable = [
        str(new)
        for new, comparison in zip(options.new, comparisons, strict=True)
        if not comparison.decidable
    ]
    if options.fail_on and not failed and undecidable:
        where = f" in {', '.join(undecidable)}" if len(comparisons) > 1 else ""
        raise StudiesNotComparable(f"no row can be compared{where}, so --fail-on cannot be checked")
    return int(failed)


def _print(old: Path, later: Sequence[Path], comparisons: Sequence[StudyComparison]) -> None:
    from rich.console import Console
    from rich.text import Text

    from labkit.analysis.pages.terminal_report import PIPED_WIDTH, print_changes

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for new, comparison in zip(later, comparisons, strict=True):
        if len(comparisons) > 1:
            console.print(Text(f"from {old} to {new}", style="bold"), soft_wrap=True)
        print_changes(comparison, console)


if __name__ == "__main__":
    sys.exit(main())
