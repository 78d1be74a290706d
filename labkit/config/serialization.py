"""Conversion of a config to JSON types and back."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, cast

from labkit.config.env_interpolation import EXPRESSION, EnvironmentText
from labkit.config.option import ConfigError, Group, require

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return a config as JSON types: dataclasses as dicts, enums as their values.

    A text from the environment is returned as its expression.
    """
    if isinstance(value, EnvironmentText):
        return value.expression
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f for f in dataclasses.fields(value) if "former_name" not in f.metadata)
        return {f.name: to_plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, known: dict[int, Any] | None = None) -> T:
    """Return a ``cls`` built from its JSON form (see :func:`to_plain`). Every rule is checked.

    The value of an environment variable replaces its expression in a text of a group with a place
    of its own; the texts of requests are never changed.

    ``known``: the groups built so far, by the identity of their JSON form, for forms that share
    parts. A group whose identity is a key with the value None is added. Raises ``ConfigError`` if a
    key is unknown, a value has the wrong type, or a rule is broken.
    """
    return cast(T, _build(cls, data, "", known or {}))


_hints = functools.cache(typing.get_type_hints)


def _build(kind: Any, data: Any, where: str, known: dict[int, Any]) -> Any:
    if known.get(id(data)) is not None:
        return known[id(data)]
    origin = typing.get_origin(kind)
    if origin in (typing.Union, UnionType):
        if data is None:
            return None
        (kind,) = (item for item in typing.get_args(kind) if item is not NoneType)
        return _build(kind, data, where, known)
    if origin is list:
        (item_kind,) = typing.get_args(kind)
        require(isinstance(data, list | tuple), f"{where}: must be a list, not {data!r}")
        return [_build(item_kind, item, f"{where}[{i}]", known) for i, item in enumerate(data)]
    if origin is dict:
        item_kind = typing.get_args(kind)[1]
        require(isinstance(data, dict), f"{where}: must be a map, not {data!r}")
        return {key: _build(item_kind, item, f"{where}.{key}", known) for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            choices = ", ".join(str(item.value) for item in kind)
            raise ConfigError(f"{where}={data}: must be one of: {choices}") from None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        require(isinstance(data, dict), f"{where}: must be a map, not {data!r}")
        hints = _hints(kind)
        prefix = f"{where}." if where else ""
        unknown = [key for key in data if key not in hints]
        require(not unknown, f"{prefix}{''.join(unknown[:1])}: no such option")
        built = {
            key: _build(hints[key], item, f"{prefix}{key}", known) for key, item in data.items()
        }
        if issubclass(kind, Group) and kind.place:
            built = {key: _from_environment(item) for key, item in built.items()}
        try:
            group = kind(**built)
        except ConfigError as error:  # a group that is used at several paths does not know its path
            several = issubclass(kind, Group) and not kind.place
            raise ConfigError(f"{prefix if several else ''}{error}") from None
        if id(data) in known:
            known[id(data)] = group
        return group
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        require(abs(data) <= sys.float_info.max, f"{where}: is too large for a number")
        return float(data)
    wrong = isinstance(data, bool) and kind in (int, float)
    require(
        kind is Any or (isinstance(data, kind) and not wrong),
        f"{where}={data!r}: must be of type {getattr(kind, '__name__', kind)}",
    )
    return data


def _from_environment(value: Any) -> Any:
    found = isinstance(value, str) and EXPRESSION.search(value)
    return EnvironmentText.of(value) if found else value
