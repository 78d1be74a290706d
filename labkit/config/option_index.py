"""The reference of options: every key of the schema with its default, range and meaning.

``--help``, ``docs/options.md`` and the lines about mistakes are made from it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any

from labkit.config.engine import ELSEWHERE
from labkit.config.experiment import Experiment
from labkit.config.option import Option, options, word
from labkit.config.server import Serve

KINDS = {bool: "true, false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Leaf:
    """One option: its key as overrides name it, its type, and what is said about it."""

    key: str
    kind: Any
    said: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may have; empty where they are not listed."""
        words = self.said.words
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            words = tuple(self.kind)
        return tuple(map(word, words))

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.said.words or self.said.range:
            return self.said.allowed
        kind = ", ".join(self.choices) or KINDS.get(self.kind) or _container(self.kind)
        null = f", or {self.said.allowed}" if self.said.allowed else ""
        return kind + null

    @property
    def meaning(self) -> str:
        """What it means, in one line; what the type of its choices says, where it says it."""
        return " ".join((self.said.meaning or inspect.getdoc(self.kind) or "").split())

    @property
    def readers(self) -> str:
        """Under which choice of another option it is read; empty: under all."""
        read = self.said.read_by
        metal = ["on Metal"] if self.said.on_metal else []
        return ", ".join(metal + ([f"{read.key}={read}"] if read else []))


@dataclass(frozen=True)
class Section:
    """A group of options: its place in the tree, what it is, and its leaves."""

    place: str
    meaning: str
    leaves: tuple[Leaf, ...]


def sections(group: Any = Experiment, place: str = "") -> Iterator[Section]:
    """Yield the groups of the schema from the root, depth first; items of lists as ``key[]``."""
    said, kinds, below = options(group), typing.get_type_hints(group), []
    leaves = []
    for item in dataclasses.fields(group):
        key, kind = f"{place}.{item.name}" if place else item.name, _core(kinds[item.name])
        if item.name in said:
            leaves.append(Leaf(key, kind, said[item.name]))
        (of,) = typing.get_args(kind) if typing.get_origin(kind) is list else (kind,)
        if dataclasses.is_dataclass(of):
            below.append((of, key if of is kind else f"{key}[]"))
    yield Section(place, _first_line(group), tuple(leaves))
    for kind, key in below:
        yield from sections(kind, key)


def find(key: str) -> Leaf | None:
    """Return the option of that key; None: there is none."""
    return _by_key().get(key)


@functools.cache
def _by_key() -> dict[str, Leaf]:
    roots = (Serve, Experiment)
    return {leaf.key: leaf for root in roots for part in sections(root) for leaf in part.leaves}


def names_below(path: Sequence[str], root: Any = Experiment) -> list[str]:
    """Return the names of the options and groups right below a place of the tree."""
    kind: Any = root
    for name in path:
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        kind = _core(hints.get(name))
    found = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return [item.name for item in found]


def help_lines(value_of: Callable[[str], Any], root: Any = Experiment) -> str:
    """Return every option with its value, what is allowed and what it means, for ``--help``."""
    lines = []
    for leaf in (leaf for section in sections(root) for leaf in section.leaves):
        lines.append(f"  {leaf.key}" + ("" if "[]" in leaf.key else f"={word(value_of(leaf.key))}"))
        readers = f"; read by {leaf.readers}" if leaf.readers else ""
        about = f"{leaf.meaning} [{leaf.allowed}{readers}]"
        lines += textwrap.wrap(about, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def page() -> str:
    """Return ``docs/options.md``."""
    lines = [HEAD]
    study = [(section.place or "The command", section) for section in sections()]
    known = {section.place for _, section in study if section.place}
    server = [
        (section.place or "`python -m labkit.serve`", section)
        for section in sections(Serve)
        if section.place not in known
    ]
    for title, section in study + server:
        if not section.leaves:
            continue
        lines += ["", f"## {title}", "", section.meaning, "", TABLE]
        for leaf in section.leaves:
            default, name = word(leaf.said.default), leaf.key.removeprefix(f"{section.place}.")
            cells = [f"`{name}`", f"`{default}`" if default else "", leaf.allowed, leaf.meaning]
            readers = [f"`{leaf.readers}`"] if leaf.readers else []
            others = [f"`{name}`" for name in ELSEWHERE if getattr(leaf.said, name)]
            lines.append(f"| {' | '.join([*cells, ', '.join(readers + others)])} |")
    return "\n".join(lines) + "\n"


def _first_line(group: Any) -> str:
    return (inspect.getdoc(group) or "").split("\n")[0].replace("``", "`")


def _core(kind: Any) -> Any:
    """Return the type of an option that may be null without the null."""
    choices = [item for item in typing.get_args(kind) if item is not NoneType]
    return choices[0] if NoneType in typing.get_args(kind) else kind


def _container(kind: Any) -> str:
    names = {list: "a list", dict: "a map"}
    return names.get(typing.get_origin(kind), "a map")


TABLE = "| option | default | allowed | meaning | read by |\n| --- | --- | --- | --- | --- |"

HEAD = """\
# Options

Every option of a study, as `group.option=value` on the command line, in a file of `conf/` or in an
arm. `python -m labkit --help` shows them with the values of a command, `--cfg job` their values
alone. An option that is not read under another's choice ("read by") must be left at its default;
so must one of `engine` that `engine=mlx_lm` or `engine=openai` lacks (those they have say so). A
server (`python -m labkit.serve`) has `engine`, `model` and what stands at the end of this page.

This page is written from `labkit/config/`: `python -m labkit.config.option_index`."""


if __name__ == "__main__":
    print(page(), end="")
