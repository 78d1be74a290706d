"""Published rows: an article's own numbers, limited to those that belong to a cell.

A row of ``ablation.published`` may have ``when: {option: value}``, such as ``{workload.concurrency:
8}``. In a sweep, only the cells with these values show the row. Differences from another arm than
the baseline of a cell are left out. If the command sets the baseline, a row shows them only if the
baseline is the one arm that it has no difference for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from labkit.config import ConfigError, Experiment, require
from labkit.config.option_index import did_you_mean

KEYS = ("source", "machine", "metric", "unit", "rows", "tables")
COMPARED_KEYS = ("delta_pct", "p", "wins")  # by arm; wins may be texts, such as 6 of 9
NUMBER_KEYS = ("arms", *COMPARED_KEYS)
TABLE_KEYS = ("title", "columns", "rows", "notes")  # shown unchanged
ROW_KEYS = ("when", "case", "metric", "unit", *NUMBER_KEYS)


def rows_of_cell(published: Any, experiment: Experiment, baseline_given: bool = False) -> Any:
    """Return the published numbers that belong to a cell; None if there are none.

    ``baseline_given``: whether the command sets ``ablation.baseline``. Raises ``ConfigError`` if a
    key is unknown, a row has no case or metric, or ``when`` names an unknown option.
    """
    if published is None:
        return None
    _check_keys("ablation.published", published, KEYS)
    for key in ("rows", "tables"):
        _check_list(f"ablation.published.{key}", published.get(key) or [])
    for index, row in enumerate(published.get("rows") or ()):
        _check_row(f"ablation.published.rows[{index}]", row, published)
    for index, table in enumerate(published.get("tables") or ()):
        place = f"ablation.published.tables[{index}]"
        _check_keys(place, table, TABLE_KEYS)
        for key in TABLE_KEYS[:3]:
            require(bool(table.get(key)), f"{place}: has no {key}; add {key}: ...")
        for key in TABLE_KEYS[1:]:
            _check_list(f"{place}.{key}", table.get(key) or [])
        for line in table["rows"]:
            _check_list(f"{place}.rows", line)
    baseline = experiment.ablation.baseline_arm
    rows = (
        _of_baseline(row, baseline, baseline_given)
        for row in published.get("rows") or ()
        if all(_value(experiment, key) == value for key, value in (row.get("when") or {}).items())
    )
    return {**published, "rows": [row for row in rows if any(row.get(k) for k in NUMBER_KEYS)]}


def _of_baseline(row: Mapping[str, Any], baseline: str, given: bool) -> dict[str, Any]:
    """Return a row without ``when``, and without differences that may be from another arm."""
    arms, hidden = set(row.get("arms") or ()), ["when"]
    compared = {arm for key in COMPARED_KEYS for arm in row.get(key) or ()}
    is_from_another = baseline in compared or (arms and baseline not in arms)
    if is_from_another or (given and arms - compared != {baseline}):
        hidden += COMPARED_KEYS
    return {key: value for key, value in row.items() if key not in hidden}


def _check_row(place: str, row: Any, published: Mapping[str, Any]) -> None:
    _check_keys(place, row, ROW_KEYS)
    for key in ("case", "metric"):
        require(bool(row.get(key) or published.get(key)), f"{place}: has no {key}; add {key}: ...")
    for key in ("when", *NUMBER_KEYS):
        by_name = row.get(key) or {}
        require(isinstance(by_name, Mapping), f"{place}.{key}: must be a map, not {by_name!r}")
    for key in NUMBER_KEYS[:3]:
        for arm, number in (row.get(key) or {}).items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            require(
                is_number and math.isfinite(number),
                f"{place}.{key}.{arm}: must be a number, not {number!r}",
            )


def _check_list(place: str, data: Any) -> None:
    require(isinstance(data, list | tuple), f"{place}: must be a list, not {data!r}")


def _check_keys(place: str, data: Any, keys: Sequence[str]) -> None:
    require(isinstance(data, Mapping), f"{place}: must be a map of keys and values, not {data!r}")
    for key in data:
        if key not in keys:
            hint = did_you_mean(str(key), keys)
            known = ", ".join(keys)
            raise ConfigError(f"{place}.{key}: no such key{hint}; the keys are: {known}")


def _value(experiment: Experiment, key: str) -> Any:
    """Return an option's value as YAML writes it; for the key of a group, the group's ``name``."""
    value: Any = experiment
    for name in key.split("."):
        if not hasattr(value, name):
            raise ConfigError(
                f"ablation.published: when: {key}: no such option; "
                "python -m labkit --help lists them"
            )
        value = getattr(value, name)
    if isinstance(value, Enum):
        return value.value
    return getattr(value, "name", value)
