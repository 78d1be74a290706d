"""A study as pandas data frames: its runs, its verdicts and its requests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from labkit.analysis.observations import run_value
from labkit.analysis.study_analysis import AnalysisCache, cell_dirs, undigested_note
from labkit.records import RecordError, read_arms, read_runs, record_paths, unlisted_records

if TYPE_CHECKING:
    from pandas import DataFrame

Json = Mapping[str, Any]
Row = dict[str, Any]
Table = Literal["runs", "verdicts", "requests"]
RUN_COLUMNS = ("cell", "run", "arm", "role", "block", "position", "outcome")
METRIC_COLUMNS = (
    "case", "skipped", "metric", "unit", "better", "primary", "value", "repeats",
)  # fmt: skip
ROW_COLUMNS = ("case", "metric", "unit", "better", "primary", "skipped")
SUMMARY_COLUMNS = ("median", "q1", "q3", "n")


def load(study: str | Path, table: Table = "runs") -> DataFrame:
    """Load a study, or one of its cells, as a data frame.

    Every table ends with a column for each option in which the arms or cells differ, named as in
    the config (``engine.scheduler.max_num_seqs``).

    Parameters
    ----------
    study
        The study's folder.
    table
        ``runs``: one line per run, case and metric. ``value`` is the run's value in ``unit`` (the
        median of its repeats on the log scale), ``repeats`` the number of repeats. A failed run
        without cases and a skipped case each have a line without a value.

        ``verdicts``: one line per cell, row of its results and arm, with the arm's median and
        quartiles (``median``, ``q1``, ``q3``, of ``n`` runs) and, except for the baseline, the
        fields of its comparison in ``cell.json`` (``effect_pct``, ``ci_low_pct``, ``p_adjusted``,
        ``verdict``, ...).

        ``requests``: one line per run and request that was answered, with its lengths in tokens
        and its times in ms; ``itl_ms`` is the list of the times between its tokens.

    Raises
    ------
    RecordError
        A record is not valid or was edited, there is no cell in the folder, or ``table`` is
        unknown.
    """
    import pandas as pd

    if table not in _TABLES:
        raise RecordError(f"table {table!r}: must be one of: {', '.join(_TABLES)}")
    folder = Path(study)
    cells = cell_dirs(folder)
    columns, rows = _TABLES[table]
    _warn_of_records_without_digests(folder, cells)
    frame = pd.DataFrame(list(rows(cells)))
    frame = frame.reindex(columns=list(dict.fromkeys([*columns, *frame.columns])))
    for name, values in varying_options(cells).items():
        frame[name] = [values[place] for place in zip(frame["cell"], frame["arm"], strict=True)]
    return frame


def varying_options(cells: Sequence[Path]) -> dict[str, dict[tuple[str, str], Any]]:
    """Return the options in which arms or cells differ, each with its value by (cell, arm).

    A value is None where the arm's config has no such option. The names of groups, such as
    ``engine.name``, are options too.
    """
    configs = {
        (cell.name, arm.name): dict(_options(arm.config))
        for cell in cells
        for arm in read_arms(cell)
    }
    names = dict.fromkeys(name for config in configs.values() for name in config)
    return {
        name: {place: config.get(name) for place, config in configs.items()}
        for name in names
        if len({_hashable(config.get(name)) for config in configs.values()}) > 1
    }


def _options(config: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _options(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hashable(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True)


def _runs(cells: Sequence[Path]) -> Iterator[Row]:
    for cell in cells:
        for record in read_runs(cell):
            run = _run(cell, record)
            for case in record.cases:
                for m in case.metrics:
                    values = (case.case, None, m.name, m.unit, m.better, m.primary,
                              run_value(m.repeats), len(m.repeats))  # fmt: skip
                    yield run | dict(zip(METRIC_COLUMNS, values, strict=True))
                if not case.metrics:
                    yield run | {"case": case.case, "skipped": case.skipped}
            if not record.cases:
                yield run


def _requests(cells: Sequence[Path]) -> Iterator[Row]:
    for cell in cells:
        for record in read_runs(cell):
            run = _run(cell, record)
            for case in record.cases:
                for request in case.notes.get("requests") or ():
                    yield {**run, "case": case.case, **request}


def _run(cell: Path, record: Any) -> Row:
    return {"cell": cell.name, **{name: getattr(record, name) for name in RUN_COLUMNS[1:]}}


def _verdicts(cells: Sequence[Path]) -> Iterator[Row]:
    analyses = AnalysisCache()
    for cell in cells:
        content = analyses.cell(cell).json
        for row in content["rows"]:
            compared = {one["arm"]: one for one in row["comparisons"]}
            for arm in content["arms"]:
                name = arm["name"]
                summary = row["arms"].get(name, {})
                yield {
                    "cell": cell.name,
                    "question": content["question"],
                    **{key: row[key] for key in ROW_COLUMNS},
                    "arm": name,
                    "role": arm["role"],
                    **{key: summary.get(key) for key in SUMMARY_COLUMNS},
                    **compared.get(name, {}),
                }


_TABLES: dict[str, tuple[Sequence[str], Callable[[Sequence[Path]], Iterator[Row]]]] = {
    "runs": ((*RUN_COLUMNS, *METRIC_COLUMNS), _runs),
    "verdicts": (
        ("cell", "question", *ROW_COLUMNS, "arm", "role", *SUMMARY_COLUMNS, "verdict", "reason"),
        _verdicts,
    ),
    "requests": ((*RUN_COLUMNS, "case", "id", "prompt_tokens", "output_tokens"), _requests),
}


def _warn_of_records_without_digests(folder: Path, cells: Sequence[Path]) -> None:
    unlisted = sum(map(unlisted_records, cells))
    if unlisted:
        records = sum(len(record_paths(cell)) for cell in cells)
        warnings.warn(undigested_note(folder, unlisted, records), stacklevel=3)
