"""The index of options: every key of the schema with its type, default, range and meaning.

``--help``, ``docs/options.md``, overrides and error messages look options up here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any

from labkit.config.experiment import Experiment
from labkit.config.option import Option, options, override_text
from labkit.config.server import ServeConfig

KIND_NAMES = {bool: "true, false", int: "an integer", float: "a number", str: "a string"}
FACTORS: dict[str, dict[str, int]] = {
    "bytes": {
        **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
        **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    },
    "seconds": {"s": 1, "m": 60, "min": 60, "h": 3600},
}
NUMBERS = {
    unit: re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)({'|'.join(factors)})(?![\w.])")
    for unit, factors in FACTORS.items()
}


@dataclass(frozen=True)
class OptionEntry:
    """One option: its key as written in an override, its type, and its metadata."""

    key: str
    kind: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values; empty if only a range or the type restricts the option."""
        choices = self.option.choices
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            choices = tuple(self.kind)
        return tuple(map(override_text, choices))

    @property
    def allowed(self) -> str:
        """The allowed values as a phrase, such as ``8, 16 and 32 (tokens)``."""
        if self.option.choices or self.option.range:
            return self.option.allowed
        kind = ", ".join(self.choices) or self.option.type_name or KIND_NAMES.get(self.kind)
        kind = kind or ("a list" if typing.get_origin(self.kind) is list else "a map")
        null = f", or {self.option.allowed}" if self.option.allowed else ""
        return kind + null

    @property
    def meaning(self) -> str:
        """The option's meaning in one line, by default its enum's docstring."""
        return " ".join((self.option.meaning or inspect.getdoc(self.kind) or "").split())

    @property
    def readers(self) -> str:
        """The condition under which the option has an effect; empty if it always has an effect."""
        read_by = self.option.read_by
        gpu = [f"on {self.option.gpu.value}"] if self.option.gpu else []
        return ", ".join(gpu + ([f"{read_by.key}={read_by}"] if read_by else []))


@dataclass(frozen=True)
class OptionGroup:
    """A group of options: its path (``engine.kv``; empty at the root), meaning and entries."""

    path: str
    meaning: str
    entries: tuple[OptionEntry, ...]


def option_groups(group: Any = Experiment, path: str = "") -> Iterator[OptionGroup]:
    """Yield the group of a dataclass and all groups nested in it, depth first.

    The group of a list's items has the path ``key[]``, where ``key`` is the list's key.
    """
    metadata = options(group)
    entries: list[OptionEntry] = []
    children: list[tuple[Any, str]] = []
    for name, kind in field_kinds(group).items():
        key = f"{path}.{name}" if path else name
        if name in metadata:
            entries.append(OptionEntry(key, kind, metadata[name]))
        (item_kind,) = typing.get_args(kind) if typing.get_origin(kind) is list else (kind,)
        if dataclasses.is_dataclass(item_kind):
            children.append((item_kind, key if item_kind is kind else f"{key}[]"))
    meaning = (inspect.getdoc(group) or "").split("\n")[0].replace("``", "`")
    yield OptionGroup(path, meaning, tuple(entries))
    for child, child_path in children:
        yield from option_groups(child, child_path)


def find_option(key: str) -> OptionEntry | None:
    """Return the entry of a key such as ``engine.kv.block_size``, or None."""
    return _entries_by_key().get(key)


@functools.cache
def _entries_by_key() -> dict[str, OptionEntry]:
    groups = (group for root in (ServeConfig, Experiment) for group in option_groups(root))
    return {entry.key: entry for group in groups for entry in group.entries}


def value_of(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key in a config in JSON types; ``default`` if the config lacks it."""
    value = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


@functools.cache
def field_kinds(group: Any) -> dict[str, Any]:
    """Return the types of a group's options and groups, without None; empty for another type."""
    if not dataclasses.is_dataclass(group):
        return {}
    hints = typing.get_type_hints(group)
    kinds = {}
    for item in dataclasses.fields(group):
        choices = typing.get_args(hints[item.name])
        known = next((choice for choice in choices if choice is not NoneType), None)
        kinds[item.name] = known if NoneType in choices else hints[item.name]
    return kinds


def child_names(path: Sequence[str], root: Any = Experiment) -> list[str]:
    """Return the names of the options and groups directly under a path of the schema."""
    kind: Any = root
    for name in path:
        kind = field_kinds(kind).get(name)
    return list(field_kinds(kind))


def override_key(override: str) -> str:
    """Return the key of an override such as ``++engine.threads=2``."""
    return override.lstrip("+~").partition("=")[0]


def in_units_of_option(override: str) -> str:
    """Convert numbers such as ``1GiB`` or ``10m`` in an override to the unit of its option.

    >>> in_units_of_option("engine.memory_limit=512MiB,1GiB")
    'engine.memory_limit=536870912,1073741824'
    >>> in_units_of_option("design.time=10m")
    'design.time=600'
    """
    key, equals, value = override.partition("=")
    entry = find_option(key.lstrip("+"))
    unit = entry.option.unit if entry is not None else ""
    if not equals or unit not in FACTORS:
        return override

    def number(match: re.Match[str]) -> str:
        product = Decimal(match.group(1)) * FACTORS[unit][match.group(2)]
        return f"{product.normalize():f}"

    return f"{key}={NUMBERS[unit].sub(number, value.strip(chr(39)))}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'resolver.seq_map'?)``; empty if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def help_lines(root: Any) -> str:
    """Return the text of ``--help``: every option with its default, meaning and allowed values."""
    entries = (entry for group in option_groups(root) for entry in group.entries)
    return "\n".join(line for entry in entries for line in entry_lines(entry, entry.option.default))


def entry_lines(entry: OptionEntry, value: Any) -> list[str]:
    """Return the lines of ``--help`` about one option."""
    shown = "" if "[]" in entry.key else f"={override_text(value)}"
    readers = f"; read by {entry.readers}" if entry.readers else ""
    about = f"{entry.meaning} [{entry.allowed}{readers}]"
    indent = " " * 6
    lines = textwrap.wrap(about, 96, initial_indent=indent, subsequent_indent=indent)
    return [f"  {entry.key}{shown}", *lines]
