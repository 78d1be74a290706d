"""Read large text files of requests piece by piece, as untrusted data.

A published trace may be a gigabyte large, and a workload needs only its beginning. So reading stops
after the requests that are needed, and no line or item may exceed a limit.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from labkit.config import ConfigError, Experiment, count_text, require
from labkit.config.requests import MAX_REQUESTS
from labkit.machine.exception_text import one_line
from labkit.machine.file_digest import FileState, file_state

MAX_LINE_CHARACTERS = 1 << 16  # of a table
MAX_ITEM_CHARACTERS = 16 << 20  # of a JSON array
CHUNK_CHARACTERS = 1 << 20
SPACE = " \t\r\n"


def limit(experiment: Experiment) -> int:
    """Return the number of requests to read: ``workload.num_requests`` if it is set.

    Otherwise the number is :data:`MAX_REQUESTS` plus 1, so that :func:`refuse_more` notices a file
    with too many requests.
    """
    return experiment.workload.num_requests or MAX_REQUESTS + 1


def state_of(path: str) -> FileState:
    """Return the state of a file; raise :class:`ConfigError` if it is not a file."""
    try:
        state = file_state(Path(path))
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    require(Path(path).is_file(), f"workload.prompts.path={path} is not a file")
    return state


def refuse_more(path: str, items: Sequence[object]) -> None:
    """Raise :class:`ConfigError` if a file has no request, or more than a workload may have."""
    require(bool(items), f"{path} has no requests")
    require(
        len(items) <= MAX_REQUESTS,
        f"{path} has more than {MAX_REQUESTS:,} requests; set workload.num_requests",
    )


def table_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place (for messages) of each row of a CSV file, and its values in ``columns``.

    Raises ``ConfigError`` if the file cannot be read, the first line lacks a column, or a line is
    too long or too short.
    """
    with _open(path) as file:
        rows = csv.reader(_lines(path, file), strict=True)
        header = _next(path, 1, rows)
        for name in columns:
            require(
                name in (header or ()),
                f"{path}, line 1: there is no column {name!r}; it must be a CSV file with the "
                f"columns {', '.join(columns)}",
            )
        places = [(header or []).index(name) for name in columns]
        while (row := _next(path, rows.line_num + 1, rows)) is not None:
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            require(len(row) > max(places), f"{where} has only {count_text(len(row), 'value')}")
            yield where, [row[place] for place in places]


def _next(path: str, number: int, rows: Iterator[list[str]]) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from None


def _lines(path: str, file: IO[str]) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE_CHARACTERS + 1):
        number += 1
        require(
            len(line) <= MAX_LINE_CHARACTERS,
            f"{path}, line {number} has more than {MAX_LINE_CHARACTERS:,} characters",
        )
        yield line


def array_items(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place (for messages) of each item of a JSON array, and the item.

    Raises ``ConfigError`` if the file cannot be read, is not a JSON array, or has an item that is
    too long or invalid.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    with _open(path) as file:
        text = _more(path, file, "").lstrip(SPACE)
        require(text.startswith("["), f"{path} is not a JSON array")
        text, number = text[1:], 0
        while True:
            text = _skip_separator(path, file, text, first=number == 0)
            if text.startswith("]"):
                return
            number += 1
            where = f"{path}, item {number}"
            item, text = _item(where, path, file, text, decoder)
            yield where, item


def _item(
    where: str, path: str, file: IO[str], text: str, decoder: json.JSONDecoder
) -> tuple[Any, str]:
    """Decode the item at the start of ``text``, and read more of the file if it is incomplete.

    Returns the item and the text after the item.
    """
    while True:
        try:
            item, end = decoder.raw_decode(text)
            return item, text[end:]
        except RecursionError as error:
            raise ConfigError(f"{where} is not valid JSON: {one_line(error)}") from None
        except ValueError as error:
            longer = _more(path, file, text)
            if longer == text:
                reason = one_line(error)
                raise ConfigError(f"{where} is not valid JSON, perhaps cut: {reason}") from None
        text = longer
        require(
            len(text) <= MAX_ITEM_CHARACTERS,
            f"{where} is not valid JSON, or has more than {MAX_ITEM_CHARACTERS:,} characters",
        )


def _skip_separator(path: str, file: IO[str], text: str, first: bool) -> str:
    text = _significant(path, file, text)
    if first or text.startswith("]"):
        return text
    require(text.startswith(","), f"{path} is not a JSON array (a comma or ] is missing)")
    return _significant(path, file, text[1:])


def _significant(path: str, file: IO[str], text: str) -> str:
    text = text.lstrip(SPACE)
    while not text and (text := _more(path, file, "")):
        text = text.lstrip(SPACE)
    return text


def _more(path: str, file: IO[str], text: str) -> str:
    # Doubling, so that decoding an item again takes at most as long as all earlier attempts.
    try:
        return text + file.read(max(CHUNK_CHARACTERS, len(text)))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from None


def _open(path: str) -> IO[str]:
    state_of(path)
    try:
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")
