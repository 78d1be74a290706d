"""Results that are in the files but are no runs or no measurements: repeats, and times of 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.records import CaseRecord

TIME_UNITS = ("s", "ms", "us")


def without_summaries(runs: Sequence[ImportedRun]) -> tuple[list[ImportedRun], tuple[str, ...]]:
    """Return the runs without files that only repeat what other files of the arm hold, and notes.

    ``vllm bench sweep serve`` writes such a summary beside its runs.

    Raises
    ------
    ResultFileError
        Two of the remaining runs have the same result.
    """
    own: dict[tuple[str | None, Path], list[str]] = {}
    for run in runs:
        if run.digest is not None:
            own.setdefault((run.arm, run.file), []).append(run.digest)
    notes = []
    # The files with most results first; of two that hold the same, the one that is named later.
    for arm, file in sorted(reversed(own), key=lambda place: -len(own[place])):
        others = {x for (a, f), found in own.items() if a == arm and f != file for x in found}
        if others.issuperset(own[arm, file]):
            del own[arm, file]
            notes.append(f"{file.name} of {arm} is not counted: it repeats results of other files")
    kept = [run for run in runs if run.digest is None or (run.arm, run.file) in own]
    _refuse_repeats(kept)
    return kept, tuple(notes)


def _refuse_repeats(runs: Sequence[ImportedRun]) -> None:
    seen: dict[str, ImportedRun] = {}
    for run in runs:
        if run.digest is None:
            continue
        other = seen.setdefault(run.digest, run)
        if other is not run:
            place = "twice" if other.file == run.file else f"that is also in {other.file}"
            raise ResultFileError(f"{run.file}: it holds a result {place}")


def without_unmeasured(runs: Sequence[ImportedRun]) -> tuple[list[ImportedRun], tuple[str, ...]]:
    """Return the runs without times that are 0 in all of them, and the names of these times.

    Tools write 0 for what they could not measure, such as the time per output token of requests
    with one token.

    Raises
    ------
    ResultFileError
        Nothing else was measured.
    """
    rows = [((case.case, m.name), m) for run in runs for case in run.cases for m in case.metrics]
    measured = {row for row, m in rows if m.unit not in TIME_UNITS or any(m.repeats)}
    names = dict.fromkeys(f"{row[1]} (0 in all runs)" for row, _ in rows if row not in measured)
    if not names:
        return list(runs), ()
    if not measured:
        raise ResultFileError(f"{runs[0].file}: all times are 0, here and in the other files")

    def kept(case: CaseRecord) -> CaseRecord:
        return replace(
            case, metrics=tuple(m for m in case.metrics if (case.case, m.name) in measured)
        )

    return [
        replace(run, cases=tuple(case for case in map(kept, run.cases) if case.metrics))
        for run in runs
    ], tuple(names)
