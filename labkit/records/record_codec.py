"""Codec of records: strict JSON, which is checked on reading and written atomically by rename.

Every file of a study is one JSON object with a ``schema_version``. NaN and infinity are refused
on reading and writing. A file that is truncated, comes from another program or has another schema
version raises an error that names the file. Unknown keys are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from labkit.records.atomic_write import write_synced
from labkit.records.record_digests import check_digest
from labkit.records.run_record import (
    OLDER_VERDICTS,
    SCHEMA_VERSION,
    Arm,
    CaseRecord,
    Metric,
    Record,
    RecordError,
    require,
)
from labkit.records.study_archive import StudyPath

MAX_DEPTH = 100  # levels of lists and objects; labkit writes about 10
MAX_NUMBER = sys.float_info.max
DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
SEPARATORS = bytes.maketrans(b":[]} \t\n\r\v\fE", b",,,,,,,,,,e")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Of a record's keys in JSON; a second type is a value that may stand in its place.
RECORD_TYPES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("arm", "role", "outcome", "started"), (str,)),
    **dict.fromkeys(("block", "position", "seed"), (int,)),
    **dict.fromkeys(("seconds", "environment", "environment_end", "probe"), (dict,)),
    **dict.fromkeys(("counters", "notes"), (dict,)),
    "detail": (str, None),
    "cases": (list,),
}


def read_json(path: StudyPath, digest: str | None = None) -> dict[str, Any]:
    """Read one JSON object of this schema version, without NaN or infinity.

    ``digest``: the SHA-256 that the file must have; None if it is unknown. Raises ``RecordError``
    if the file is missing, unreadable, truncated or edited, lacks this schema version, is nested
    too deeply, or has a number that is no finite float.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    check_digest(path, content, digest)
    try:
        data = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise RecordError(f"{path} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise RecordError(f"{path} is not valid JSON, perhaps truncated: {error}") from None
    if _may_be_large(content) or _bracket_depth(content) > MAX_DEPTH:
        _check_values(path, data)
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RecordError(f"{path} is not a labkit file (it has no schema_version)")
    if data["schema_version"] != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema version {data['schema_version']!r}, but this labkit reads "
            f"{SCHEMA_VERSION}; use the version of labkit that wrote it"
        )
    return data


def _may_be_large(content: bytes) -> bool:
    if b"0" * 309 in content.translate(DIGITS_AS_ZERO):
        return True
    # A number with an exponent that is not negative is a lone "e" without its digits.
    short = content.translate(SEPARATORS, b"0123456789.+")
    return b",e," in short or b",-e," in short


def _bracket_depth(content: bytes) -> int:
    """Return the depth of a JSON text; too large if brackets stand in its strings."""
    brackets = content.translate(None, NO_BRACKETS)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _check_values(path: StudyPath, data: Any) -> None:
    """Check the depth and the numbers of JSON values, one level after the other."""
    level = [data]
    for _ in range(MAX_DEPTH):
        for value in level:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and not -MAX_NUMBER <= value <= MAX_NUMBER:
                raise RecordError(f"{path} has a number above {MAX_NUMBER:.1e}")
        level = [
            item
            for value in level
            if isinstance(value, list | dict)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise RecordError(f"{path} is nested more than {MAX_DEPTH} levels deep")


def write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write strict JSON to a temporary file beside ``path``, sync it and rename it.

    Raises ``ValueError`` if a value is NaN, infinite or not JSON. Nothing is written. Raises
    ``OSError`` if the disk is full or the folder cannot be written. ``path`` is unchanged.
    """
    write_synced(path, to_bytes(data, indent=indent))


def to_bytes(data: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    """Return an object as the bytes of a JSON file; raises ``ValueError`` for NaN or infinity."""
    return (json.dumps(data, allow_nan=False, indent=indent) + "\n").encode()


def record_from_json(data: Mapping[str, Any]) -> Record:
    """Build a record from its JSON; raises ``ValueError`` or ``TypeError``."""
    fields = {name: _checked(data, name, *types) for name, types in RECORD_TYPES.items()}
    fields["cases"] = tuple(map(_case_from_json, fields["cases"]))
    return Record(**fields, extra=_unknown_keys(data, ("schema_version", "run", *fields)))


def _case_from_json(data: Any) -> CaseRecord:
    require(isinstance(data, dict), "a case is not an object")
    return CaseRecord(
        case=_checked(data, "case", str),
        skipped=_checked(data, "skipped", str, None),
        metrics=tuple(_metric_from_json(item) for item in _checked(data, "metrics", list)),
        outputs=_checked(data, "outputs", dict, None),
        notes=_checked(data, "notes", dict),
    )


def _metric_from_json(data: Any) -> Metric:
    require(isinstance(data, dict), "a metric is not an object")
    name = _checked(data, "name", str)
    repeats = _checked(data, "repeats", list)
    require(
        set(map(type, repeats)) <= {int, float},
        f"metric {name}: an item of repeats is not a number",
    )
    return Metric(
        name=name,
        unit=_checked(data, "unit", str),
        better=_checked(data, "better", str),
        primary=_checked(data, "primary", bool),
        repeats=tuple(map(float, repeats)),
    )


ARM_KEYS = ("schema_version", "arm", "role", "overrides", "config", "claims", "environment")


def arm_from_json(data: Mapping[str, Any]) -> Arm:
    """Build an arm from its JSON; raises ``ValueError`` or ``TypeError``."""
    claims = _checked(data, "claims", dict)
    return Arm(
        name=_checked(data, "arm", str),
        role=_checked(data, "role", str),
        overrides=_checked(data, "overrides", dict),
        config=_checked(data, "config", dict),
        identity=_checked(claims, "identity", str),
        engaged=tuple(_checked(claims, "engaged", list)),
        all_served=claims.get("all_served", False) is True,
        out_of_memory=claims.get("out_of_memory", False) is True,
        quality=_checked({"quality": {}, **claims}, "quality", dict),
        environment=_checked({"environment": {}, **data}, "environment", dict),
        inputs=_checked({"inputs": {}, **data}, "inputs", dict),
        extra=_unknown_keys(data, (*ARM_KEYS, "inputs")),
    )


def with_current_verdicts(data: dict[str, Any]) -> dict[str, Any]:
    """Give the verdicts of a ``cell.json`` their current names, and return it.

    Raises ``ValueError`` or ``TypeError`` if it lacks a part or has one of another type.
    """
    _checked(data, "design", dict)
    _checked(data, "arms", list)
    for row in _checked(data, "rows", list) if "rows" in data else ():
        for comparison in _checked(row, "comparisons", list):
            word = _checked(comparison, "verdict", str)
            comparison["verdict"] = OLDER_VERDICTS.get(word, word)
    return data


def _checked(data: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Return ``data[key]``, which must have the type ``kind`` or equal ``default`` (if given)."""
    if key not in data:  # faster than require(): a large study has millions of fields
        raise RecordError(f"{key} is missing")
    value = data[key]
    if type(value) is not kind and value not in default:
        raise RecordError(f"{key} is {value!r}, not of type {kind.__name__}")
    return value


def _unknown_keys(data: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    known = set(known)
    return {key: value for key, value in data.items() if key not in known}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
