"""An option: a field of the schema, with all that is said about it as the field's metadata.

A group's options are checked here against that metadata; ``--help``, ``docs/options.md`` and
the error lines say it (:mod:`labkit.config.option_index`). What spans options is a rule in the
``__post_init__`` of the group that holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

OWN_CLASS = "package.module:Class"


class ConfigError(ValueError):
    """A mistake in the configuration, said in one line."""

    outcome = "refused"  # of the run that raises it: labkit.experiment.run_failures


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def is_class_path(text: str) -> bool:
    """Tell whether ``text`` looks like ``package.module:Class``."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def word(value: Any) -> str:
    """Write an option's value as it is written in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return ("[{}]" if isinstance(value, list) else "{{{}}}").format("..." if value else "")
    return str(value.value if isinstance(value, Enum) else value)


@dataclass(frozen=True)
class ReadBy:
    """The choices of the option ``key`` that read an option; the others want it left alone."""

    key: str
    choices: tuple[Any, ...]

    def __contains__(self, choice: Any) -> bool:
        own = OWN_CLASS in self.choices and is_class_path(str(choice))
        return own or choice in self.choices

    def __str__(self) -> str:
        return ", ".join(map(word, self.choices))


@dataclass(frozen=True)
class Option:
    """What is said about an option.

    Parameters
    ----------
    default
        Its value where nothing is set; null: it may be null.
    meaning
        One sentence for people; empty where the type of the choices says it.
    unit
        What its numbers count.
    least, above, most, multiple_of
        The range of its numbers; ``above`` is open.
    words
        The values besides those numbers; empty: any.
    own_class
        Whether it may name a class of the user's.
    null
        What null stands for, where that is the default.
    read_by
        Who reads it; None: everybody.
    mlx_lm, openai
        Whether ``engine=mlx_lm``, or ``engine=openai``, or its worker reads it too.
    on_metal
        Whether it changes nothing anywhere else.
    """

    default: Any
    meaning: str = ""
    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    multiple_of: int | None = None
    words: tuple[Any, ...] = ()
    own_class: bool = False
    null: str = ""
    read_by: ReadBy | None = None
    mlx_lm: bool = False
    openai: bool = False
    on_metal: bool = False

    def holds(self, value: Any) -> bool:
        """Tell whether a value of the right type is one that is allowed."""
        if value is None or value in self.words:
            return True
        if self.own_class and is_class_path(value):
            return True
        if not self.range:
            return not self.words
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        return not isinstance(number, str) and self._in_range(number)

    def _in_range(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )

    @property
    def range(self) -> str:
        """The range of its numbers, in words; empty where there is none."""
        if self.multiple_of is not None:
            return f"multiples of {self.multiple_of} from {self.least} to {self.most}"
        if self.above is not None:
            return f"above {self.above}" + (f", at most {self.most}" if self.most else "")
        if self.least is not None:
            return f"{self.least} to {self.most}" if self.most else f"{self.least} or more"
        return ""

    @property
    def allowed(self) -> str:
        """What is allowed, in words: ``1 to 1024 (threads), or null for all cores``."""
        *rest, last = [*map(str, self.words), *([OWN_CLASS] if self.own_class else [])] or [""]
        joined = "or" if self.own_class else "and"
        said = f"{', '.join(rest)} {joined} {last}" if rest else last
        if self.range:
            said = f"{', '.join(map(str, self.words))} or {self.range}" if said else self.range
        unit = f" ({self.unit})" if self.unit else ""
        null = f"null for {self.null}" if self.null else "null"
        return said + unit + ((", or " if said else "") + null if self.default is None else "")


def option(default: Any = None, meaning: str = "", *, factory: Any = None, **said: Any) -> Any:
    """Return a dataclass field with its default (or its ``factory``) and what is said about it."""
    made: dict[str, Any] = {"default": default} if factory is None else {"default_factory": factory}
    about = Option(factory() if factory else default, meaning, **said)
    return dataclasses.field(**made, metadata={"option": about})


def options(group: Any) -> dict[str, Option]:
    """Return the options of a group's class, by their names."""
    fields = dataclasses.fields(group)
    return {item.name: item.metadata["option"] for item in fields if "option" in item.metadata}


class Group:
    """Options that stand together, each checked when the group is made.

    ``place``: where the group stands in the tree, as overrides name it.
    """

    place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str = "") -> None:
        super().__init_subclass__()
        cls.place = place

    def __post_init__(self) -> None:
        """Check every option's value, and that nothing is set that nobody reads."""
        for name, said, value in self.options():
            where = f"{self.key(name)}={word(value)}"
            require(said.holds(value), f"{where}: allowed are {said.allowed}")
        for key in dict.fromkeys(said.read_by.key for _, said, _ in self.options() if said.read_by):
            place, _, name = key.rpartition(".")
            if place == self.place:
                self.refuse_unread(key, getattr(self, name))

    def key(self, name: str) -> str:
        """Return how an error line names an option."""
        return f"{self.place}.{name}" if self.place else name

    def refuse_unread(self, key: str, choice: Any) -> None:
        """Refuse what is set and not read where the option ``key`` is ``choice``."""
        for name, said, _ in self.options():
            if said.read_by is not None and said.read_by.key == key and choice not in said.read_by:
                why = f"{key}={word(choice)} does not read it; it is for {said.read_by}"
                self.require_default(name, why)

    def require_default(self, name: str, why: str) -> None:
        """Refuse, for the reason given, an option that is not left at its default."""
        value, default = getattr(self, name), options(type(self))[name].default
        require(
            value == default,
            f"{self.key(name)}={word(value)}: {why}; leave it {word(default)}",
        )

    def options(self) -> Iterator[tuple[str, Option, Any]]:
        """Yield the group's options: name, what is said about it, and its value."""
        for name, said in options(type(self)).items():
            yield name, said, getattr(self, name)

    def groups(self) -> Iterator[Group]:
        """Yield this group and every group below it."""
        yield self
        for below in vars(self).values():
            if isinstance(below, Group):
                yield from below.groups()
