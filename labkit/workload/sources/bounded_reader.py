"""Read files of requests as untrusted data.

A published trace may be a gigabyte large, and a workload needs only its beginning. So tables and
JSON arrays are read piece by piece. Reading stops after the requests that are needed, and no line
or item may exceed a limit. Files of JSON lines are written by users and read as a whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from labkit.config import ConfigError, Experiment, count_text, from_plain, require
from labkit.config.requests import MAX_REQUESTS
from labkit.machine.exception_text import one_line
from labkit.machine.file_digest import FileState, file_state

T = TypeVar("T")
MAX_LINE_CHARACTERS = 1 << 16  # of a table
MAX_ITEM_CHARACTERS = 16 << 20  # of a JSON array
CHUNK_CHARACTERS = 1 << 20
MAX_FILE_BYTES = 256 << 20  # of JSON lines
MAX_QUOTE_LENGTH = 200  # characters of a line that an error message quotes
SPACE = " \t\r\n"


def first_requests(experiment: Experiment, read: Callable[[str], Iterator[T]]) -> tuple[T, ...]:
    """Return the requests that ``read`` yields of the workload's file, as many as it needs.

    They are ``workload.num_requests`` or, if that is not set, all. Raises ``ConfigError`` if the
    file has no request, or more than a workload may have.
    """
    path = experiment.workload.prompts.path or ""
    # One more than a workload may have, so that a file with too many is noticed.
    limit = experiment.workload.num_requests or MAX_REQUESTS + 1
    return _first_requests(path, read, limit, state_of(path))


@lru_cache(maxsize=8)
def _first_requests(
    path: str, read: Callable[[str], Iterator[T]], limit: int, state: FileState
) -> tuple[T, ...]:
    requests = tuple(islice(read(path), limit))
    require(bool(requests), f"{path} has no requests")
    require(
        len(requests) <= MAX_REQUESTS,
        f"{path} has more than {MAX_REQUESTS:,} requests; set workload.num_requests",
    )
    return requests


def state_of(path: str) -> FileState:
    """Return the state of a file; raise :class:`ConfigError` if it is not a file."""
    try:
        state = file_state(Path(path))
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    require(Path(path).is_file(), f"workload.prompts.path={path} is not a file")
    return state


def table_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place (for messages) of each row of a CSV file, and its values in ``columns``.

    Raises ``ConfigError`` if the file cannot be read, the first line lacks a column, or a line is
    too long or too short.
    """
    with _opened(path) as file:
        rows = csv.reader(_lines(path, file), strict=True)
        header = _next(path, 1, rows) or []
        for name in columns:
            require(
                name in header,
                f"{path}, line 1: there is no column {name!r}; it must be a CSV file with the "
                f"columns {', '.join(columns)}",
            )
        places = [header.index(name) for name in columns]
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


def _lines(path: str, file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS + 1), ""), 1):
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
    with _opened(path) as file:
        text, number = file.read(CHUNK_CHARACTERS).lstrip(SPACE), 0
        require(text.startswith("["), f"{path} is not a JSON array")
        text = _significant(file, text[1:])
        has_more = not text.startswith("]")
        while has_more:
            number += 1
            where = f"{path}, item {number}"
            item, text = _item(where, file, text, decoder)
            yield where, item
            text = _significant(file, text)
            has_more = text.startswith(",")
            message = f"{path} is not a JSON array (a comma or ] is missing)"
            require(has_more or text.startswith("]"), message)
            if has_more:
                text = _significant(file, text[1:])


def _item(where: str, file: IO[str], text: str, decoder: json.JSONDecoder) -> tuple[Any, str]:
    """Decode the item at the start of ``text``, reading more; return it and the text after it."""
    while True:
        try:
            item, end = decoder.raw_decode(text)
            return item, text[end:]
        except RecursionError as error:
            raise ConfigError(f"{where} is not valid JSON: {one_line(error)}") from None
        except ValueError as error:
            # Doubling, so that decoding again takes at most as long as all earlier attempts.
            more = file.read(max(CHUNK_CHARACTERS, len(text)))
            if not more:
                reason = one_line(error)
                raise ConfigError(f"{where} is not valid JSON, perhaps cut: {reason}") from None
        text += more
        require(
            len(text) <= MAX_ITEM_CHARACTERS,
            f"{where} is not valid JSON, or has more than {MAX_ITEM_CHARACTERS:,} characters",
        )


def _significant(file: IO[str], text: str) -> str:
    """Return ``text`` from its first character on that is no space, reading more if it has none."""
    text = text.lstrip(SPACE)
    while not text and (text := file.read(CHUNK_CHARACTERS)):
        text = text.lstrip(SPACE)
    return text


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    """Open a file. Raises ``ConfigError`` if it cannot be read or is not UTF-8."""
    state_of(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from None


def read_json_lines(
    experiment: Experiment, kind: type[T], *, other_keys: bool = False
) -> tuple[T, ...]:
    """Return one instance of the dataclass ``kind``, which validates it, per line of the file.

    With ``other_keys``, a line may have keys that ``kind`` lacks, which are ignored. Raises
    ``ConfigError`` if the file cannot be read, or a line is invalid. The message names the file and
    for an invalid line the line, the key and the allowed values.
    """
    path = experiment.workload.prompts.path or ""
    state = state_of(path)
    require(
        state.size <= MAX_FILE_BYTES,
        f"{path} has {state.size:,} bytes; it must have at most {MAX_FILE_BYTES:,}",
    )
    return _json_lines(path, kind, other_keys, state)  # type: ignore[arg-type]


def line_number(path: str, index: int) -> int:
    """Return the number of the line that holds a file's request ``index``, counted from 0.

    The file must have been read before.
    """
    lines = Path(path).read_text("utf-8-sig").split("\n")
    return [number for number, line in enumerate(lines, 1) if line.strip()][index]


@lru_cache(maxsize=4)
def _json_lines(path: str, kind: type[T], other_keys: bool, state: FileState) -> tuple[T, ...]:
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    items = tuple(_checked_lines(path, text, kind, other_keys))
    require(bool(items), f"{path} has no requests")
    return items


def _checked_lines(path: str, text: str, kind: type[T], other_keys: bool) -> Iterator[T]:
    allowed = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        count += 1
        where = f"{path}, line {number}"
        require(
            count <= MAX_REQUESTS, f"{where}: the file must have at most {MAX_REQUESTS:,} requests"
        )
        data = _object(where, line)
        if other_keys:
            data = {key: value for key, value in data.items() if key in allowed}
        unknown = next((key for key in data if key not in allowed), None)
        require(
            unknown is None,
            f"{where}: no key {_short(unknown)!r}; the keys are: {', '.join(allowed)}",
        )
        try:
            yield from_plain(kind, data)
        except ConfigError as error:
            raise ConfigError(f"{where}: {_short(error)}") from None


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {one_line(error)}") from None
    require(isinstance(data, dict), f"{where} is not a JSON object")
    return dict(data)


def _short(quote: object) -> str:
    """Return ``quote`` as text of at most ``MAX_QUOTE_LENGTH`` characters, cut if it is longer."""
    text = str(quote)
    return text if len(text) <= MAX_QUOTE_LENGTH else f"{text[:MAX_QUOTE_LENGTH]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {_short(twice)!r} twice")
    return members


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")
