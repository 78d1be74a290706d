"""Records as a table for Python: one line per run, case and metric."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.rows import run_value
from labkit.analysis.study_analysis import cell_dirs
from labkit.records import read_runs

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = (
    "cell",
    "run",
    "arm",
    "role",
    "block",
    "position",
    "outcome",
    "case",
    "skipped",
    "metric",
    "unit",
    "better",
    "primary",
    "value",
    "repeats",
)


def load(study_dir: str | Path) -> DataFrame:
    """Load the records of a study (or of one cell).

    Returns
    -------
    pandas.DataFrame
        One line per run, case and metric; ``value`` is the run's number (the median of
        its repeats on the log scale, in ``unit``), ``repeats`` how many there were. A run
        without cases (a failed one) and a skipped case keep a line without a value.

    Raises
    ------
    RecordError
        A record is not valid, or there is no cell in the folder.
    """
    import pandas as pd

    lines: list[tuple[Any, ...]] = []
    for cell in cell_dirs(Path(study_dir)):
        for r in read_runs(cell):
            run = (cell.name, r.run, r.arm, r.role, r.block, r.position, r.outcome)
            for case in r.cases:
                lines += [
                    (*run, case.case, None, m.name, m.unit, m.better, m.primary,
                     run_value(m.repeats), len(m.repeats))
                    for m in case.metrics
                ]  # fmt: skip
                if not case.metrics:
                    lines.append((*run, case.case, case.skipped, *[None] * 6))
            if not r.cases:
                lines.append((*run, *[None] * 8))
    return pd.DataFrame(lines, columns=list(COLUMNS))
