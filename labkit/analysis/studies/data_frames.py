"""A study as pandas data frames: its runs, its verdicts and its requests."""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from labkit.analysis.comparison.cell_analysis import read_data
from labkit.analysis.comparison.observations import run_value
from labkit.analysis.comparison.perplexity_and_kl import INTERVAL_KEYS, limit_fields
from labkit.analysis.model.dataclass_json import fields_to_json
from labkit.analysis.studies.study_analysis import AnalysisCache, undigested_note
from labkit.analysis.studies.study_discovery import cell_dirs
from labkit.config.package_extras import require_packages
from labkit.records import (
    ArchivePath,
    RecordError,
    StudyPath,
    open_study,
    read_arms,
    read_runs,
    record_paths,
    unlisted_records,
)

if TYPE_CHECKING:
    from pandas import DataFrame

Json = Mapping[str, Any]
Row = dict[str, Any]
Table = Literal["runs", "verdicts", "requests", "quality"]
RUN_COLUMNS = ("cell", "run", "arm", "role", "block", "position", "outcome")
METRIC_COLUMNS = (
    "case", "skipped", "metric", "unit", "better", "primary", "value", "repeats",
)  # fmt: skip
ROW_COLUMNS = ("case", "metric", "unit", "better", "primary", "skipped")
STORED_RUNS = "labkit-runs.json"  # in an archive: the table of runs
STORED_FORMAT = 2  # 1: without stalls even where verdicts are about times with stalls
UNLISTED = "without_digest"
SUMMARY_COLUMNS = ("median", "q1", "q3", "n")


def load(study: str | Path, table: Table = "runs") -> DataFrame:
    """Load a study, or one of its cells, as a data frame.

    Every table ends with a column for each option in which the arms or cells differ, named as in
    the config (``engine.scheduler.max_num_seqs``).

    Parameters
    ----------
    study
        The study's folder or archive.
    table
        ``runs``: one line per run, case and metric. ``value`` is the run's value in ``unit`` (the
        median of its repeats on the log scale), ``repeats`` the number of repeats. Times are with
        stalls where the verdicts are about times with stalls. A run that failed before its first
        case has one line without a value, and so has a skipped case.

        ``verdicts``: one line per cell, result row and arm. It has the arm's median and quartiles
        (``median``, ``q1``, ``q3``, of ``n`` runs) and, except for the baseline, the fields of the
        arm's comparison in ``cell.json`` (``effect_pct``, ``ci_low_pct``, ``p_adjusted``,
        ``verdict``, ...). If the workload scores texts, there are columns for the arm's quality and
        the ends of its intervals (``kl_mean``, ``kl_mean_low``, ``kl_mean_high``, ...).

        ``requests``: one line per run and answered request, with the request's lengths in tokens
        and its times in ms; ``itl_ms`` is the list of the times between its tokens.
        These times are without stalls, also where those of the other tables are with stalls.

        ``quality``: one line per cell, arm and metric (``kl_mean``, ...), with the ``estimate`` and
        its interval, ``low`` to ``high``: a 95 % interval, or a 98.3 % interval if looks decided
        how many windows were scored. Only arms that scored texts have lines.

    Raises
    ------
    RecordError
        A record is not valid or was edited, the archive was altered, there is no cell, or
        ``table`` is unknown.
    """
    require_packages(("pandas",), "pandas")
    import pandas as pd

    if table not in _TABLES:
        raise RecordError(f"table {table!r}: must be one of: {', '.join(_TABLES)}")
    opened = open_study(study)
    columns = _stored_runs(opened) if table == "runs" else None
    if columns is None:
        columns = table_columns(opened, table)
        unlisted, records = _count_records(opened)
    else:
        unlisted, records = columns.pop(UNLISTED)
    if unlisted:
        warnings.warn(undigested_note(opened, unlisted, records), stacklevel=2)
    return pd.DataFrame(columns)


def table_columns(study: StudyPath, table: Table) -> dict[str, list[Any]]:
    """Return the columns of a table of :func:`load`; None stands for a missing value."""
    cells = cell_dirs(study)
    names, rows_of = _TABLES[table]
    rows = list(rows_of(cells))
    names = list(dict.fromkeys([*names, *(name for row in rows for name in row)]))
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    places = list(zip(columns["cell"], columns["arm"], strict=True))
    for name, values in varying_options(cells).items():
        columns[name] = [values[place] for place in places]
    return columns


def _count_records(study: StudyPath) -> list[int]:
    """Return the number of records without a digest, and of all records."""
    cells = cell_dirs(study)
    return [sum(map(unlisted_records, cells)), sum(len(record_paths(cell)) for cell in cells)]


def store_runs(study: StudyPath) -> bytes:
    """Return the table of runs as JSON. An archive stores it, so that loading needs no records.

    A column of texts is stored as its distinct values and an index per line. The table of 100,000
    runs has millions of lines, so it is encoded line by line and written column by column.
    """
    cells = cell_dirs(study)
    columns = {name: _StoredColumn() for name in (*RUN_COLUMNS, *METRIC_COLUMNS)}
    options = varying_options(cells)
    columns |= {name: _StoredColumn() for name in options}
    for row in _runs(cells):
        place = row["cell"], row["arm"]
        for name, column in columns.items():
            column.add(options[name][place] if name in options else row.get(name))
    head = json.dumps({"format": STORED_FORMAT, UNLISTED: _count_records(study)})[:-1]
    stored = BytesIO()  # large: no column is in memory as text beside another
    stored.write(f'{head}, "columns": {{'.encode())
    for number, (name, column) in enumerate(columns.items()):
        stored.write(f"{', ' if number else ''}{json.dumps(name)}: ".encode())
        stored.write(column.json().encode())
    stored.write(b"}}")
    return stored.getvalue()


class _StoredColumn:
    """A column as an archive stores it: numbers, or distinct values and an index per line."""

    def __init__(self) -> None:
        self._numbers: list[int | float] | None = []
        self._distinct: dict[Hashable, tuple[int, Any]] = {}
        self._index = array("I")

    def add(self, value: Any) -> None:
        if self._numbers is not None:
            if type(value) in (int, float):
                self._numbers.append(value)
                return
            earlier, self._numbers = self._numbers, None
            for number in earlier:
                self.add(number)
        key = value if type(value) is str else (_hashable(value),)
        number, _ = self._distinct.setdefault(key, (len(self._distinct), value))
        self._index.append(number)

    def json(self) -> str:
        if self._numbers is not None:
            return json.dumps(self._numbers, allow_nan=False)
        values = json.dumps([value for _, value in self._distinct.values()], allow_nan=False)
        return f'{{"values": {values}, "index": [{", ".join(map(str, self._index))}]}}'


def _stored_runs(study: StudyPath) -> dict[str, Any] | None:
    """Return an archive's stored columns, which its digest covers; None if it has no such table."""
    if not isinstance(study, ArchivePath) or not (study / STORED_RUNS).is_file():
        return None
    try:
        stored = json.loads((study / STORED_RUNS).read_bytes())
        if stored["format"] != STORED_FORMAT:
            return None
        columns = {str(name): _decoded(column) for name, column in stored["columns"].items()}
        unlisted, records = map(int, stored[UNLISTED])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise RecordError(f"{study / STORED_RUNS} is not valid: {error}") from None
    if len({len(column) for column in columns.values()}) > 1:
        raise RecordError(f"{study / STORED_RUNS} is not valid: its columns differ in length")
    return {**columns, UNLISTED: (unlisted, records)}


def _decoded(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    values = column["values"]
    return [values[number] for number in column["index"]]


def varying_options(cells: Sequence[StudyPath]) -> dict[str, dict[tuple[str, str], Any]]:
    """Return the options in which arms or cells differ, each with its value by (cell, arm).

    A value is None where the arm's config has no such option. The names of groups, such as
    ``engine.name``, are options too.
    """
    configs = {
        (cell.name, arm.name): dict(config_options(arm.config))
        for cell in cells
        for arm in read_arms(cell)
    }
    names = dict.fromkeys(name for config in configs.values() for name in config)
    return {
        name: {place: config.get(name) for place, config in configs.items()}
        for name in names
        if len({_hashable(config.get(name)) for config in configs.values()}) > 1
    }


def config_options(config: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option of an arm's config and its value, named as on the command line."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from config_options(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hashable(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True)


def _runs(cells: Sequence[StudyPath]) -> Iterator[Row]:
    for cell in cells:
        for record in read_data(cell).judged_records:
            run = _run(cell, record)
            for case in record.cases:
                for m in case.metrics:
                    values = (m.name, m.unit, m.better, m.primary, run_value(m.repeats))
                    own = (case.case, None, *values, len(m.repeats))
                    yield run | dict(zip(METRIC_COLUMNS, own, strict=True))
                if not case.metrics:
                    yield run | {"case": case.case, "skipped": case.skipped}
            if not record.cases:
                yield run


def _requests(cells: Sequence[StudyPath]) -> Iterator[Row]:
    for cell in cells:
        for record in read_runs(cell):
            run = _run(cell, record)
            for case in record.cases:
                for request in case.known_notes.get("requests") or ():
                    yield {**run, "case": case.case, **request}


def _run(cell: StudyPath, record: Any) -> Row:
    return {"cell": cell.name, **{name: getattr(record, name) for name in RUN_COLUMNS[1:]}}


def _verdicts(cells: Sequence[StudyPath]) -> Iterator[Row]:
    analyses = AnalysisCache()
    for folder in cells:
        cell = analyses.cell(folder).cell
        for row in cell.rows:
            for arm in cell.arms:
                values, comparison = row.arms.get(arm.name), row.comparison(arm.name)
                quality = limit_fields(cell.qualities.get(arm.name)) if cell.quality else {}
                yield {
                    "cell": folder.name,
                    "question": cell.question,
                    **{key: getattr(row, key) for key in ROW_COLUMNS},
                    "arm": arm.name,
                    "role": arm.role,
                    **{key: getattr(values, key, None) for key in SUMMARY_COLUMNS},
                    **(fields_to_json(comparison) if comparison is not None else {}),
                    **quality,
                }


def _quality(cells: Sequence[StudyPath]) -> Iterator[Row]:
    analyses = AnalysisCache()
    for folder in cells:
        for quality in analyses.cell(folder).cell.quality or ():
            counts = {key: getattr(quality, key) for key in ("arm", "windows", "tokens")}
            for metric, interval in quality.metrics.items():
                yield {"cell": folder.name, **counts, "metric": metric, **fields_to_json(interval)}


_TABLES: dict[str, tuple[Sequence[str], Callable[[Sequence[StudyPath]], Iterator[Row]]]] = {
    "runs": ((*RUN_COLUMNS, *METRIC_COLUMNS), _runs),
    "verdicts": (
        ("cell", "question", *ROW_COLUMNS, "arm", "role", *SUMMARY_COLUMNS, "verdict", "reason"),
        _verdicts,
    ),
    "requests": ((*RUN_COLUMNS, "case", "id", "prompt_tokens", "output_tokens"), _requests),
    "quality": (("cell", "arm", "windows", "tokens", "metric", *INTERVAL_KEYS), _quality),
}
