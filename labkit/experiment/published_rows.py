"""What an article published, of one cell: rows that were measured under other options go.

A row of ``ablation.published`` may have ``when: {option: value}``, such as ``{workload.concurrency:
8}``: it is shown in the cells of a sweep that have these values, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from labkit.config import ConfigError, Experiment, require
from labkit.config.option_index import did_you_mean

KEYS = ("source", "machine", "metric", "unit", "rows", "tables")
NUMBERS = ("arms", "delta_pct", "p", "wins")  # of arms, by their name; some may be theirs alone
TABLE_KEYS = ("title", "columns", "rows", "notes")  # shown word for word
ROW_KEYS = ("when", "case", "metric", "unit", *NUMBERS)


def of_cell(published: Any, whole: Experiment) -> Any:
    """Return the published numbers without the rows of other cells.

    Raises
    ------
    ConfigError
        A key that is not known, a row without a case or a metric, or ``when`` names no option.
    """
    if published is None:
        return None
    _known("ablation.published", published, KEYS)
    for index, row in enumerate(published.get("rows") or ()):
        place = f"ablation.published.rows[{index}]"
        _known(place, row, ROW_KEYS)
        for key in ("case", "metric"):
            require(bool(row.get(key) or published.get(key)), f"{place}: it needs a {key}")
    for index, table in enumerate(published.get("tables") or ()):
        place = f"ablation.published.tables[{index}]"
        _known(place, table, TABLE_KEYS)
        for key in TABLE_KEYS[:3]:
            require(bool(table.get(key)), f"{place}: it needs {key}")
    rows = [row for row in published.get("rows") or () if _of_this(row, whole)]
    return {**published, "rows": [{k: v for k, v in row.items() if k != "when"} for row in rows]}


def _known(place: str, given: Any, keys: Sequence[str]) -> None:
    require(isinstance(given, Mapping), f"{place}: must be a map, not {given!r}")
    for key in given:
        near = did_you_mean(str(key), keys)
        require(key in keys, f"{place}.{key}: no such key{near}; there are: {', '.join(keys)}")


def _of_this(row: Mapping[str, Any], whole: Experiment) -> bool:
    when = row.get("when") or {}
    return all(_value(whole, key) == value for key, value in when.items())


def _value(whole: Experiment, key: str) -> Any:
    """Return an option's value as YAML writes it; a group stands for its name."""
    found: Any = whole
    for name in key.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"ablation.published: when: {key}: there is no such option")
        found = getattr(found, name)
    if isinstance(found, Enum):
        return found.value
    return getattr(found, "name", found)
