"""Tables as data: each column declares its heading, value and format once for all renderers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def text_or_empty(value: Any) -> str:
    """Return a value as text; None becomes an empty string."""
    return "" if value is None else str(value)


def if_known(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a format that writes None as an empty string."""
    return lambda value: "" if value is None else form(value)


def broken_name(name: str) -> str:
    """Return a name of more than ten letters with line breaks after underscores and hyphens."""
    return re.sub(r"([_-])(?=\w)", r"\1\n", name) if len(name) > 10 else name


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table whose lines have type ``T``."""

    heading: str
    value: Callable[[T], Any]  # a function from a line to the cell's value
    format: Callable[[Any], str] = text_or_empty  # a function from the value to its text
    # Whether values are numbers: right-aligned, and sorted by size on the HTML page.
    numeric: bool = True
    # A heading for narrow terminals. With None, ``heading`` is broken after underscores and
    # hyphens.
    short_heading: str | None = None
    min_width: int = 0  # terminals narrower than this (in characters) leave the column out
    # Whether the value is the same in all lines that belong to one row of ``cell.json``.
    once_per_row: bool = False
    # Whether values are verdicts, which terminals show in colour and without their reasons.
    is_verdict: bool = False
    # Whether texts are quoted, such as tokens; Markdown shows them as code.
    verbatim: bool = False
    # A function from a line to the target of the cell's link on the HTML page.
    link: Callable[[T], str] | None = None
    # A function from a line to the strength of the cell's background on the HTML page, 0 to 1; None
    # for a cell without background.
    shade: Callable[[T], float | None] | None = None

    def text(self, line: T) -> str:
        return self.format(self.value(line))


@dataclass(frozen=True)
class Table(Generic[T]):
    """Columns, lines, and notes below the table."""

    columns: tuple[Column[T], ...]
    lines: tuple[T, ...]
    notes: tuple[str, ...] = ()
    # Whether lines are :class:`labkit.analysis.tables.results_table.ResultLine`.
    is_results: bool = False
    prose: bool = False  # whether cells are phrases that may be broken into several lines

    def cells(self, line: T) -> list[str]:
        return [column.text(line) for column in self.columns]
