"""Files of requests: a JSON object a line, read as data that may be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from labkit.config import ConfigError, from_plain, require
from labkit.config.request_mix import MOST_REQUESTS
from labkit.machine.exception_text import one_line

T = TypeVar("T")
MOST_BYTES = 256 << 20
LONGEST = 200  # characters of a mistake


def read(path: str, kind: type[T]) -> tuple[T, ...]:
    """Read a file whose every line holds a ``kind``, a dataclass that checks itself.

    Raises
    ------
    ConfigError
        One line: the file, the number of the line, the key and what is allowed.
    """
    file = Path(path)
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    require(file.is_file(), f"workload.prompts.path={path}: not a file")
    require(
        found.st_size <= MOST_BYTES,
        f"{path}: {found.st_size:,} bytes; allowed are {MOST_BYTES:,}",
    )
    return _read(path, kind, found.st_mtime_ns, found.st_size)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _read(path: str, kind: type[T], modified: int, size: int) -> tuple[T, ...]:
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    found = tuple(_items(path, text, kind))
    require(bool(found), f"{path}: no request in it")
    return found


def _items(path: str, text: str, kind: type[T]) -> Iterator[T]:
    allowed = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        count += 1
        where = f"{path}, line {number}"
        require(count <= MOST_REQUESTS, f"{where}: allowed are {MOST_REQUESTS:,} requests")
        data = _object(where, line)
        unknown = next((key for key in data if key not in allowed), None)
        require(unknown is None, f"{where}: {_short(unknown)!r}: allowed are {', '.join(allowed)}")
        try:
            yield from_plain(kind, data)
        except ConfigError as error:
            raise ConfigError(f"{where}: {_short(error)}") from None


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {one_line(error)}") from None
    require(isinstance(data, dict), f"{where}: not an object of keys and values")
    return dict(data)


def _short(said: object) -> str:
    """Cut what quotes a line that may be megabytes long."""
    text = str(said)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
