"""Read and write frozen dataclasses as JSON, by their field types.

A dataclass is an object of its fields in order. A field declared with :func:`absent` has no key in
the file while it is None. A class whose fields do not stand for keys defines ``to_json`` and
``from_json`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_ABSENT = "absent if None"


def absent() -> Any:
    """Declare a field that is None by default, and then has no key in the file."""
    return field(default=None, metadata={_ABSENT: True})


def to_json(value: Any) -> Any:
    """Return a value of the model as JSON types."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def fields_to_json(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as a JSON object, in their order."""
    items = ((f, getattr(value, f.name)) for f in fields(value))
    return {
        f.name: to_json(item) for f, item in items if not (item is None and f.metadata.get(_ABSENT))
    }


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON, unknown keys left out; raise ``KeyError`` if one is missing."""
    parts: Any = kind
    read: tuple[tuple[str, bool, _Reader | None], ...] = _readers(parts)
    values = {}
    for name, required, reader in read:
        if required or name in data:
            value = data[name]
            values[name] = value if reader is None or value is None else reader(value)
    return kind(**values)


@cache
def _readers(kind: Any) -> tuple[tuple[str, bool, _Reader | None], ...]:
    """Return each field's name, whether it must be in the file, and its reader."""
    hints = get_type_hints(kind)
    return tuple(
        (f.name, f.default is MISSING and f.default_factory is MISSING, _reader(hints[f.name]))
        for f in fields(kind)
    )


def _reader(hint: Any) -> _Reader | None:
    """Return the function that reads a value of a type from JSON; None if it stays as it is."""
    if hasattr(hint, "from_json"):
        return cast(_Reader, hint.from_json)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(from_json, hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return partial(np.array, dtype=np.float64)
    if origin is UnionType:
        return _reader(inner[0])
    if origin is tuple:
        item = _reader(inner[0])
        return tuple if item is None else lambda values: tuple(_known(item, v) for v in values)
    if origin is Mapping and (of := _reader(inner[1])) is not None:
        return lambda values: {key: _known(of, value) for key, value in values.items()}
    return None


def _known(reader: _Reader, value: Any) -> Any:
    return None if value is None else reader(value)
