"""The schema as strict JSON: read with checks, written whole by rename.

Every file of a study is one JSON object with a ``schema_version``; NaN and infinity are
refused both ways. Reading is strict: a truncated file, a foreign one or one of another
schema version is refused by name. Keys that this version does not know are kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from labkit.records.record_schema import (
    SCHEMA_VERSION,
    Arm,
    CaseRecord,
    Metric,
    Record,
    RecordError,
    require,
)


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


def record_from(data: Mapping[str, Any]) -> Record:
    """Build a record from its JSON; raises ``ValueError`` or ``TypeError``."""
    known = [f.name for f in dataclasses.fields(Record) if f.name != "extra"]
    return Record(
        arm=_take(data, "arm", str),
        role=_take(data, "role", str),
        block=_take(data, "block", int),
        position=_take(data, "position", int),
        seed=_take(data, "seed", int),
        outcome=_take(data, "outcome", str),
        started=_take(data, "started", str),
        detail=_take(data, "detail", str, None),
        seconds=_take(data, "seconds", dict),
        environment=_take(data, "environment", dict),
        environment_end=_take(data, "environment_end", dict),
        probe=_take(data, "probe", dict),
        counters=_take(data, "counters", dict),
        cases=tuple(_case(item) for item in _take(data, "cases", list)),
        notes=_take(data, "notes", dict),
        extra=_rest(data, ["schema_version", "run", *known]),
    )


def _case(data: Any) -> CaseRecord:
    require(isinstance(data, dict), "a case is not an object")
    return CaseRecord(
        case=_take(data, "case", str),
        skipped=_take(data, "skipped", str, None),
        metrics=tuple(_metric(item) for item in _take(data, "metrics", list)),
        outputs=_take(data, "outputs", dict, None),
        notes=_take(data, "notes", dict),
    )


def _metric(data: Any) -> Metric:
    require(isinstance(data, dict), "a metric is not an object")
    name = _take(data, "name", str)
    repeats = _take(data, "repeats", list)
    require(
        set(map(type, repeats)) <= {int, float},
        f"metric {name}: repeats holds something that is not a number",
    )
    return Metric(
        name=name,
        unit=_take(data, "unit", str),
        better=_take(data, "better", str),
        primary=_take(data, "primary", bool),
        repeats=tuple(map(float, repeats)),
    )


def arm_from(data: Mapping[str, Any]) -> Arm:
    """Build an arm from its JSON; raises ``ValueError`` or ``TypeError``."""
    claims = _take(data, "claims", dict)
    return Arm(
        name=_take(data, "arm", str),
        role=_take(data, "role", str),
        overrides=_take(data, "overrides", dict),
        config=_take(data, "config", dict),
        identity=_take(claims, "identity", str),
        engaged=tuple(_take(claims, "engaged", list)),
        all_served=claims.get("all_served", False) is True,
        extra=_rest(data, ["schema_version", "arm", "role", "overrides", "config", "claims"]),
    )


def cell_from(data: dict[str, Any]) -> dict[str, Any]:
    """Check what every ``cell.json`` has; raises ``ValueError``."""
    _take(data, "design", dict)
    _take(data, "arms", list)
    return data


def _take(data: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Return ``data[key]``, checked to be of type ``kind`` or one of ``default``."""
    if key not in data:  # not by require(): a big study has millions of fields, most right
        raise RecordError(f"{key} is missing")
    value = data[key]
    if type(value) is not kind and value not in default:
        raise RecordError(f"{key} is {value!r}, not of type {kind.__name__}")
    return value


def _rest(data: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the items of ``data`` whose keys are not ``known``."""
    known = set(known)
    return {key: value for key, value in data.items() if key not in known}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
