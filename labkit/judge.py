"""``python -m labkit.judge A... --against B...``: the verdict on result files of other tools.

A and B are files, or folders of files, of one tool; each file is a run of its arm, or holds runs.
A file that names its arms (hyperfine with several commands, or a CSV) needs no ``--against``; its
first arm is the baseline. The runs become a study, with its report in a folder. Exit codes: 0 if no
primary row is worse by the margin or more; 1 if a row is worse, or if a run failed; 125 if a row is
undecided; 2 for a mistake in the command or in a file; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli.program_base import Program, print_notes, user_path
from labkit.compare import margin
from labkit.config import ConfigError
from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.importers.result_files import read_files
from labkit.importers.study_writer import ImportedStudy, arm_name, write_study

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis

BASE, HEAD = "base", "head"
MAX_NAMED = 5  # fields that are not judged


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.records import RecordError

    parser = Program(
        prog="python -m labkit.judge",
        description="Judge repeated results of other tools (docs/judge.md).",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="A", help="result files, or folders of them"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        metavar="B",
        help="files of the baseline",
    )
    parser.add_argument(
        "--margin",
        type=margin,
        default=2.0,
        metavar="PCT",
        help="changes smaller than this do not matter (percent; default 2%%)",
    )
    parser.add_argument(
        "--summary", type=user_path, metavar="FILE", help="append a Markdown summary"
    )
    parser.add_argument("--out", type=user_path, metavar="DIR", help="folder of the report")
    return parser.run(argv, _run, refused=(ConfigError, ResultFileError, RecordError))


def _run(options: argparse.Namespace) -> int:
    from labkit.analysis.findings import regression_gate
    from labkit.analysis.pages import report_files
    from labkit.analysis.pages.terminal_report import print_cell
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.cli import run_study

    regression_gate.check_summary(options.summary)
    runs = _runs(options.files, options.against)
    study = ImportedStudy.of(runs)
    title = " and ".join(study.arms[1:]) + f" against {study.arms[0]}"
    with run_study.claimed_folder(options.out) as out:
        if out.exists() and any(out.iterdir()):
            raise ResultFileError(f"{out}: there are files in this folder; name another with --out")
        cache = AnalysisCache()
        with _emptied_on_failure(out):
            folder = write_study(study, out, f"{study.runs[0].tool}: {title}", options.margin)
            report_files.write_study(out, plots=False, analysis_cache=cache)
    print_cell(folder, analysis_cache=cache)
    print(f"page: {out / 'report.html'}")
    analysis = cache.cell(folder)
    for line in _more_runs(analysis):
        print(line)
    if study.unjudged:
        first, more = study.unjudged[:MAX_NAMED], len(study.unjudged) - MAX_NAMED
        rest = f" and {more} more" if more > 0 else ""
        print_notes("labkit.judge", [f"not judged: {', '.join(first)}{rest}"])
    results = {
        arm: list(regression_gate.row_results(arm, analysis.cell, arm)) for arm in study.arms[1:]
    }
    caveats = "\n\n".join(study.caveats)
    text = regression_gate.markdown(title, results, options.margin)
    regression_gate.publish_summary(f"{text}\n{caveats}\n", options.summary)
    return 1 if any(run.failure for run in runs) else regression_gate.total(results).value


@contextmanager
def _emptied_on_failure(folder: Path) -> Iterator[None]:
    """Remove what was written into a folder that was empty or absent if the block fails."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for path in folder.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed:
            with suppress(OSError):  # it could not be created
                folder.rmdir()
        raise


def _runs(files: Sequence[Path], against: Sequence[Path]) -> list[ImportedRun]:
    """Return the runs with the names of their arms, the baseline's first."""
    if not against:
        runs = read_files(files)
        for run in runs:
            if run.arm is None:
                raise ResultFileError(f"{run.file}: it names no arms; add --against FILE")
        return list(_named(runs))
    runs = []
    for arm, own in ((BASE, against), (HEAD, files)):
        found = read_files(own)
        names = list(dict.fromkeys(str(run.arm) for run in found))
        if len(names) > 1:
            raise ResultFileError(
                f"{found[0].file}: it has several arms ({', '.join(names)}): leave out --against, "
                "or give each its own file"
            )
        if both := {run.file for run in runs} & {run.file for run in found}:
            raise ResultFileError(f"{min(both)}: it is named on both sides of --against")
        runs += [replace(run, arm=arm) for run in found]
    return runs


def _named(runs: Sequence[ImportedRun]) -> Iterator[ImportedRun]:
    """Yield the runs with names that folders can have; refuse arms whose names become equal."""
    given: dict[str, str] = {}
    for run in runs:
        name, text = arm_name(str(run.arm)), str(run.arm)
        if given.setdefault(name, text) != text:
            raise ResultFileError(
                f"{run.file}: arms {given[name]!r} and {text!r} would both be called {name!r}; "
                "rename one"
            )
        yield replace(run, arm=name)


def _more_runs(analysis: CellAnalysis) -> Iterator[str]:
    """Yield how many runs more of each arm an open question needs."""
    from labkit.analysis.comparison.verdict import blocks_to_decide, target_effect_pct
    from labkit.analysis.statistics.power import MIN_RUNS_TO_CLAIM
    from labkit.config import count_text

    criteria = analysis.data.criteria
    for row, c in analysis.cell.compared:
        if not row.primary:
            continue
        have, place = c.blocks * criteria.runs, f"{row.case}, {row.metric}, {c.arm}"
        if c.verdict == "estimate_only" and have < MIN_RUNS_TO_CLAIM:
            more = count_text(MIN_RUNS_TO_CLAIM - have, "more run")
            yield f"{place}: a verdict needs at least {more} of each arm"
        per_block = criteria.runs if criteria.runs <= 2 else 1  # a long block grows by runs
        need = blocks_to_decide(c, criteria, per_block) if c.verdict == "inconclusive" else None
        if need is not None and need * per_block > have:
            more = count_text(need * per_block - have, "more run")
            target = abs(target_effect_pct(c.effect_pct or 0.0))
            yield f"{place}: about {more} of each arm would detect {target:g} %"


if __name__ == "__main__":
    sys.exit(main())
