"""Whether imported runs can be compared: one tool, the same work, the same settings of an arm.

What differs is refused, or named in one line if a verdict makes sense in spite of it. Results that
are no runs, or no measurements, are left out: repeats, and times of 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.records import CaseRecord
from labkit.records.metric_registry import TIME_UNITS

SAME_WORK = 0.01  # relative; another random seed changes the work by less than this
MAX_NAMED = 5  # settings in one line
OTHER_CASES = {
    "GuideLLM": (
        "a sweep chooses other rates in every report: use a profile with fixed rates (constant, "
        "poisson or concurrent), the same ones in all reports"
    )
}


def check_alike(runs: Sequence[ImportedRun]) -> None:
    """Raise ``ResultFileError`` for copies, other tools or work, or settings that vary in arms."""
    first = runs[0]
    files: dict[bytes, Path] = {}
    for file in dict.fromkeys(run.file for run in runs):
        other = files.setdefault(file.read_bytes(), file)
        if other != file:
            raise ResultFileError(f"{file} has the same content as {other}")
    by_arm = {run.arm: run for run in reversed(runs)}
    for run in runs:
        if run.tool != first.tool:
            raise ResultFileError(f"{run.file} is of {run.tool}, but {first.file} of {first.tool}")
        _check_equal(run, first, run.work, first.work)
        _check_equal(run, by_arm[run.arm], run.settings, by_arm[run.arm].settings)
    cases = {case.case for run in runs for case in run.cases}
    if not any(cases <= {case.case for case in run.cases} for run in runs):
        reason = OTHER_CASES.get(first.tool, "are the files of one suite?")
        raise ResultFileError(f"{first.file}: no run has all cases; {reason}")


def _check_equal(
    run: ImportedRun, other: ImportedRun, own: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    for key in dict.fromkeys([*own, *theirs]):
        for place, value, expected in _differing(key, own.get(key), theirs.get(key)):
            raise ResultFileError(
                f"{run.file}: {place} is {value!r}, but {expected!r} in {other.file}"
            )


def _differing(place: str, own: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places inside two values where they differ, and what is there."""
    if isinstance(own, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*own, *theirs]):
            yield from _differing(f"{place}.{key}", own.get(key), theirs.get(key))
    elif isinstance(own, list) and isinstance(theirs, list) and len(own) == len(theirs):
        for index, pair in enumerate(zip(own, theirs, strict=True)):
            yield from _differing(f"{place}[{index}]", *pair)
    elif own != theirs:
        yield place, own, theirs


def differing_amounts(arms: Sequence[str], runs: Sequence[ImportedRun]) -> Iterator[str]:
    """Yield a line for each amount of work that the arms did not have in common.

    Raises ``ResultFileError`` if an arm was given more or less than the baseline, by more than a
    random seed explains.
    """
    for arm in arms[1:]:
        for key, own, base in _amounts(runs, arm, arms[0], lambda run: run.given):
            line = f"{key} is {_range_text(own)} in {arm}, but {_range_text(base)} in {arms[0]}"
            apart = max(own) < min(base) or max(base) < min(own)
            medians = statistics.median(own), statistics.median(base)
            if apart and not math.isclose(*medians, rel_tol=SAME_WORK):
                file = next(run.file for run in runs if run.arm == arm)
                raise ResultFileError(
                    f"{file}: {line}: they were given different work; use the same data, lengths "
                    "and random seeds"
                )
            yield f"the arms were not given exactly the same work: {line}"
        for key, own, base in _amounts(runs, arm, arms[0], lambda run: run.generated):
            line = f"{key} is {_range_text(own)} in {arm}, but {_range_text(base)} in {arms[0]}"
            yield f"the arms did not generate equally many tokens: {line}"


def _amounts(
    runs: Sequence[ImportedRun],
    arm: str,
    baseline: str,
    amounts: Callable[[ImportedRun], Mapping[str, float]],
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield amounts that differ: name, the arm's values, the baseline's; failed runs had less."""
    whole = [run for run in runs if run.failure is None]
    for key in dict.fromkeys(key for run in whole for key in amounts(run)):
        own, base = (
            [amounts(run)[key] for run in whole if run.arm == name and key in amounts(run)]
            for name in (arm, baseline)
        )
        if own and base and _distribution(own) != _distribution(base):
            yield key, own, base


def _distribution(values: Sequence[float]) -> tuple[set[float], float]:
    return set(values), statistics.median(values)


def _range_text(values: Sequence[float]) -> str:
    return " to ".join(f"{value:,.12g}" for value in sorted({min(values), max(values)}))


def varying_settings(arms: Sequence[str], runs: Sequence[ImportedRun]) -> dict[str, dict[str, Any]]:
    """Return the settings in which the arms' files differ: by name, each arm's value."""
    settings = {arm: next(run.settings for run in runs if run.arm == arm) for arm in arms}
    values = {
        key: {arm: own.get(key) for arm, own in settings.items()}
        for key in dict.fromkeys(key for own in settings.values() for key in own)
    }
    return {
        key: by_arm
        for key, by_arm in values.items()
        if any(value != by_arm[arms[0]] for value in by_arm.values())
    }


def differing_settings(varying: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line that names the :func:`varying_settings`, if there are any."""
    named = [
        f"{key} ({', '.join(f'{value!r} in {arm}' for arm, value in by_arm.items())})"
        for key, by_arm in varying.items()
    ]
    if named:
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        yield f"the arms' files differ in {', '.join(named[:MAX_NAMED])}{more}"


def without_summaries(runs: Sequence[ImportedRun]) -> tuple[list[ImportedRun], tuple[str, ...]]:
    """Return the runs without files that only repeat what other files of the arm hold, and notes.

    ``vllm bench sweep serve`` writes such a summary beside its runs.

    Raises ``ResultFileError`` if two of the remaining runs have the same result.
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
    seen: dict[str, ImportedRun] = {}
    for run in kept:
        other = run if run.digest is None else seen.setdefault(run.digest, run)
        if other is not run:
            place = "twice" if other.file == run.file else f"that is also in {other.file}"
            raise ResultFileError(f"{run.file}: it holds a result {place}")
    return kept, tuple(notes)


def without_unmeasured(runs: Sequence[ImportedRun]) -> tuple[list[ImportedRun], tuple[str, ...]]:
    """Return the runs without times that are 0 in all of them, and the names of these times.

    Tools write 0 for what they could not measure, such as the time per output token of requests
    with one token.

    Raises ``ResultFileError`` if nothing else was measured.
    """
    rows = [((case.case, m.name), m) for run in runs for case in run.cases for m in case.metrics]
    measured = {row for row, m in rows if m.unit not in TIME_UNITS or any(m.repeats)}
    names = dict.fromkeys(f"{row[1]} (0 in all runs)" for row, _ in rows if row not in measured)
    if not names:
        return list(runs), ()
    if not measured:
        raise ResultFileError(f"{runs[0].file}: all times are 0, here and in the other files")

    def kept(case: CaseRecord) -> CaseRecord:
        metrics = (m for m in case.metrics if (case.case, m.name) in measured)
        return replace(case, metrics=tuple(metrics))

    return [
        replace(run, cases=tuple(case for case in map(kept, run.cases) if case.metrics))
        for run in runs
    ], tuple(names)
