"""The JSON form of frozen dataclasses: their fields in order, read back by their types.

A field declared with :func:`absent` has no key in the file while it is None. A class whose
fields do not stand for keys defines ``to_json`` and ``from_json`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
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
    """Build a dataclass from a JSON object; unknown keys are left out.

    Raises ``KeyError`` if a key without a default is missing.
    """
    parts: Any = kind
    hints: list[tuple[Field[Any], Any]] = _hints(parts)
    return kind(**{f.name: _part(hint, data[f.name]) for f, hint in hints if _has(data, f)})


def _has(data: Mapping[str, Any], own: Field[Any]) -> bool:
    required = own.default is MISSING and own.default_factory is MISSING
    return required or own.name in data


@cache
def _hints(kind: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(own, hints[own.name]) for own in fields(kind)]


def _part(hint: Any, value: Any) -> Any:
    """Return a field's value of the type that its hint names."""
    if value is None or hint is Any:
        return value
    if hasattr(hint, "from_json"):
        return hint.from_json(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return from_json(hint, value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return np.array(value, np.float64)
    if origin is tuple:
        return tuple(_part(inner[0], item) for item in value)
    if origin is Mapping:
        return {key: _part(inner[1], item) for key, item in value.items()}
    if origin is UnionType:
        return _part(inner[0], value)
    return value
