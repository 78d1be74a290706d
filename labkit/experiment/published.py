"""What an article published, of one cell: rows that were measured under other options go.

A row of ``ablation.published`` may have ``when: {option: value}``, such as ``{workload.concurrency:
8}``: it is shown in the cells of a sweep that have these values, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from labkit.config import ConfigError, Experiment


def of_cell(published: Any, whole: Experiment) -> Any:
    """Return the published numbers without the rows of other cells.

    Raises
    ------
    ConfigError
        ``when`` names no option.
    """
    if not isinstance(published, Mapping):
        return published
    rows = [row for row in published.get("rows") or () if _of_this(row, whole)]
    return {**published, "rows": [{k: v for k, v in row.items() if k != "when"} for row in rows]}


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
