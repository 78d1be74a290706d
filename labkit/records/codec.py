"""Strict JSON files: read with checks, written whole by rename.

Every file of a study is one JSON object with a ``schema_version``; NaN and infinity are
refused both ways. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A file that is not what it should be; the message is one line and names the file."""


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of this schema version, without NaN or infinity.

    Raises
    ------
    RecordError
        The file is missing, unreadable, truncated, foreign or of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RecordError(f"{path}: not valid JSON, truncated or foreign: {error}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RecordError(f"{path}: not a labkit file (no schema_version)")
    if data["schema_version"] != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema version {data['schema_version']!r}; this labkit reads {SCHEMA_VERSION}"
        )
    return data


def write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write strict JSON to a temporary file beside ``path``, sync it, rename it.

    Raises
    ------
    ValueError
        A value is NaN, infinite or not JSON; nothing is written.
    OSError
        The disk is full or the folder cannot be written; ``path`` is as it was.
    """
    text = json.dumps(data, allow_nan=False, indent=indent) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def take(data: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Give ``data[key]``, checked to be of type ``kind`` or one of ``default``."""
    if key not in data:  # not by require(): a big study has millions of fields, most right
        raise RecordError(f"{key} is missing")
    value = data[key]
    if type(value) is not kind and value not in default:
        raise RecordError(f"{key} is {value!r}, not of type {kind.__name__}")
    return value


def rest(data: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Give the items of ``data`` whose keys are not ``known``."""
    known = set(known)
    return {key: value for key, value in data.items() if key not in known}


def require(condition: bool, message: str) -> None:
    """Raise ``RecordError(message)`` unless ``condition`` holds."""
    if not condition:
        raise RecordError(message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
