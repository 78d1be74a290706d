"""Read JSON-lines files of requests: one object per line, validated as untrusted data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from labkit.config import ConfigError, from_plain, require
from labkit.config.requests import MAX_REQUESTS
from labkit.machine.exception_text import one_line
from labkit.machine.file_digest import FileState, file_state

T = TypeVar("T")
MAX_FILE_BYTES = 256 << 20
MAX_QUOTE_LENGTH = 200  # characters of a line that an error message quotes


def read(path: str, kind: type[T], *, other_keys: bool = False) -> tuple[T, ...]:
    """Read a file and return one instance of ``kind`` per line.

    Parameters
    ----------
    kind
        A dataclass that validates its instances.
    other_keys
        Whether a line may have keys that ``kind`` lacks, which are then ignored.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is invalid. The message names the file and, for an
        invalid line, the line, the key and the allowed values.
    """
    file = Path(path)
    try:
        state = file_state(file)
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    require(file.is_file(), f"workload.prompts.path={path} is not a file")
    require(
        state.size <= MAX_FILE_BYTES,
        f"{path} has {state.size:,} bytes; it must have at most {MAX_FILE_BYTES:,}",
    )
    return _read(path, kind, other_keys, state)  # type: ignore[arg-type]


def line_number(path: str, index: int) -> int:
    """Return the number of the line that holds a file's request ``index``, counted from 0.

    The file must have been read before.
    """
    lines = Path(path).read_text("utf-8-sig").split("\n")
    return [number for number, line in enumerate(lines, 1) if line.strip()][index]


@lru_cache(maxsize=4)
def _read(path: str, kind: type[T], other_keys: bool, state: FileState) -> tuple[T, ...]:
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"workload.prompts.path={path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    items = tuple(_items(path, text, kind, other_keys))
    require(bool(items), f"{path} has no requests")
    return items


def _items(path: str, text: str, kind: type[T], other_keys: bool) -> Iterator[T]:
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
