"""A CSV file: a line per run, with columns for the arm, the run, a block or a time, and metrics."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import Fields, ImportedRun, ResultFileError, ResultFormat, metric
from labkit.records import BETTER, CaseRecord, Metric
from labkit.records.metric_registry import METRICS

OWN = ("arm", "run", "block", "time", "case")


def _header(text: str) -> Sequence[str]:
    try:
        return [name.strip() for name in next(csv.reader(io.StringIO(text)), [])]
    except csv.Error:  # a text of another kind, such as one long line
        return []


def _read_csv(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield the runs. Lines of the same arm and run (and case) are repeats within the run."""
    header = _header(document)
    columns = {name: _column(name, file) for name in header if name not in OWN}
    named = Counter(name for name, _, _ in columns.values())
    twice = [name for name in header if header.count(name) > 1]
    twice += [name for name, count in named.items() if count > 1]
    if twice:
        raise ResultFileError(f"{file}: two columns are named {twice[0]!r}")
    if not columns:
        raise ResultFileError(f"{file}: it has no column of a metric, such as latency:ms:lower")
    runs: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    lines = csv.reader(io.StringIO(document))
    next(lines)
    for number, line in enumerate(_lines(lines, file), 2):
        if not line:
            continue
        if len(line) != len(header):
            raise ResultFileError(
                f"{file}, line {number}: it has {len(line)} columns, the header has {len(header)}"
            )
        row = {name: cell.strip() for name, cell in zip(header, line, strict=True)}
        runs.setdefault((row["arm"], row["run"]), []).append(row)
    if not runs:
        raise ResultFileError(f"{file}: it has no line of a run")
    for (arm, run), rows in runs.items():
        place = f"{file}: arm {arm}, run {run}: "
        cases: dict[str, list[Mapping[str, str]]] = {}
        for each in rows:
            cases.setdefault(each.get("case", "all"), []).append(each)
        for name in ("block", "time"):
            if len({each.get(name) for each in rows}) > 1:
                raise ResultFileError(f"{place}{name} is not the same in all lines")
        time = rows[0].get("time")
        records = (
            CaseRecord(name, metrics=tuple(_metrics(columns, own, place)))
            for name, own in cases.items()
        )
        yield ImportedRun(
            "CSV",
            file,
            tuple(records),
            started=_number(time, "time", place) if time else None,
            arm=arm,
            block=rows[0].get("block") or None,
        )


def _lines(reader: Iterator[list[str]], file: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ResultFileError(f"{file}: {error}") from None


def _column(name: str, file: Path) -> tuple[str, str, str]:
    """Return the metric's name, unit and direction: ``latency:ms:lower``, or a name of labkit's."""
    if name in METRICS:
        return name, METRICS[name].unit, METRICS[name].better
    parts = name.split(":")
    if len(parts) != 3 or not all(parts) or parts[2] not in BETTER:
        raise ResultFileError(
            f"{file}: column {name!r}: write NAME:UNIT:lower or NAME:UNIT:higher, or a metric of "
            "labkit, such as ttft_p50_ms"
        )
    return parts[0], parts[1], parts[2]


def _metrics(
    columns: Mapping[str, tuple[str, str, str]], rows: Sequence[Mapping[str, str]], place: str
) -> Iterator[Metric]:
    for column, (name, unit, better) in columns.items():
        yield metric(name, [_number(row[column], column, place) for row in rows], unit, better)


def _number(text: str, column: str, place: str) -> float:
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    return Fields({column: value}, place).number(column)


FORMATS = (
    ResultFormat(
        "CSV",
        lambda document: isinstance(document, str) and {"arm", "run"} <= {*_header(document)},
        _read_csv,
    ),
)
