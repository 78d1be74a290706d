"""Options (fields of the schema with metadata) and the groups that hold them.

A group checks its options against their metadata, which ``--help``, ``docs/options.md`` and error
messages show (:mod:`labkit.config.option_index`). Rules that involve several options are in the
``__post_init__`` of their group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

CLASS_PATH = "package.module:Class"


class ConfigError(ValueError):
    """A mistake in the configuration. The message is one line."""

    outcome = "refused"  # of a run that raises this error (labkit.experiment.worker.run_failures)


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def is_class_path(text: str) -> bool:
    """Return whether ``text`` has the form ``package.module:Class``."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def count_text(n: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1: ``1 block``, ``4 blocks``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def override_text(value: Any) -> str:
    """Return an option's value as an override spells it, such as ``null`` or ``true``.

    Lists and maps are shortened to ``[...]`` and ``{...}``. A text from the environment is its
    expression.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return ("[{}]" if isinstance(value, list) else "{{{}}}").format("..." if value else "")
    return f"{value.value if isinstance(value, Enum) else value}"


class GPU(Enum):
    """The GPUs on which an option has an effect, as help texts name them."""

    metal = "Metal"
    any = "a GPU"


@dataclass(frozen=True)
class ReadBy:
    """A condition: the option ``key`` has one of the values ``choices``."""

    key: str
    choices: tuple[Any, ...]

    def __contains__(self, choice: Any) -> bool:
        own = CLASS_PATH in self.choices and is_class_path(str(choice))
        return own or choice in self.choices

    def __str__(self) -> str:
        return ", ".join(map(override_text, self.choices))


@dataclass(frozen=True)
class Option:
    """Metadata of an option. The names of its range (``ge``, ...) are those of pydantic."""

    default: Any  # if it is None, the option may be null
    meaning: str = ""  # one sentence; if it is empty, the docstring of the option's enum is shown
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    multiple_of: int | None = None
    choices: tuple[Any, ...] = ()  # allowed values, besides the numbers in the range if it has one
    class_path: bool = False  # whether the value may be a user's class, package.module:Class
    null_means: str = ""
    read_by: ReadBy | None = None  # when the option has an effect; None: always
    mlx_lm: bool = False  # whether the option also applies to engine=mlx_lm
    openai: bool = False  # whether the option also applies to engine=openai
    gpu: GPU | None = None  # on which it has an effect; None: on a CPU, too
    type_name: str = ""  # of an option whose annotation is ``Any``, in help texts; empty: a map

    def accepts(self, value: Any) -> bool:
        """Return whether ``value``, whose type has been checked before, is allowed."""
        if value is None or value in self.choices:
            return True
        if self.class_path and is_class_path(value):
            return True
        if not self.range:
            return not self.choices
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        return (
            not isinstance(number, str)
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )

    @property
    def range(self) -> str:
        """The range as a phrase, such as ``1 to 1024``; empty if there is none."""
        if self.multiple_of is not None:
            return f"a multiple of {self.multiple_of} from {self.ge} to {self.le}"
        if self.gt is not None:
            return f"above {self.gt}" + (f" and at most {self.le}" if self.le else "")
        if self.ge is not None:
            return f"{self.ge} to {self.le}" if self.le else f"{self.ge} or more"
        return ""

    @property
    def allowed(self) -> str:
        """The allowed values as a phrase: ``1 to 1024 (threads), or null for all cores``."""
        *rest, last = [*map(str, self.choices), *([CLASS_PATH] if self.class_path else [])] or [""]
        phrase = f"{', '.join(rest)} or {last}" if rest else last
        if self.range:
            phrase = (
                f"{', '.join(map(str, self.choices))} or {self.range}" if phrase else self.range
            )
        unit = f" ({self.unit})" if self.unit else ""
        null = f"null for {self.null_means}" if self.null_means else "null"
        return phrase + unit + ((", or " if phrase else "") + null if self.default is None else "")


def option(default: Any = None, meaning: str = "", *, factory: Any = None, **metadata: Any) -> Any:
    """Return a dataclass field with a default (or ``factory``) and ``Option`` metadata."""
    defaults: dict[str, Any] = (
        {"default": default} if factory is None else {"default_factory": factory}
    )
    spec = Option(factory() if factory else default, meaning, **metadata)
    return dataclasses.field(**defaults, metadata={"option": spec})


def former_name() -> Any:
    """Return a dataclass field, null by default, for the former name of an option.

    Configs may still set it, and the group's ``__post_init__`` then sets the option instead. It has
    no place in the option's documentation nor in the JSON form of a config.
    """
    return dataclasses.field(default=None, metadata={"former_name": True})


def options(group: Any) -> dict[str, Option]:
    """Return the options of a group's class by name."""
    fields = dataclasses.fields(group)
    return {item.name: item.metadata["option"] for item in fields if "option" in item.metadata}


class Group:
    """A group of options. Creating an instance checks its options.

    ``place`` is the path of the group in the schema, such as ``engine.kv``. It is empty for the
    root and for a class that is used at several paths.
    """

    place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str = "") -> None:
        super().__init_subclass__()
        cls.place = place

    def __post_init__(self) -> None:
        """Check every option's value, and refuse options that are set but have no effect."""
        for name, spec, value in self.options():
            where = f"{self.key(name)}={override_text(value)}"
            infinite = isinstance(value, float) and not math.isfinite(value)
            require(not infinite, f"{where}: must be a finite number")
            require(spec.accepts(value), f"{where}: must be {spec.allowed}")
        for key in dict.fromkeys(spec.read_by.key for _, spec, _ in self.options() if spec.read_by):
            place, _, name = key.rpartition(".")
            if place == self.place:
                self.refuse_unread(key, getattr(self, name))

    def key(self, name: str) -> str:
        """Return an option's key as in overrides, for error messages."""
        return f"{self.place}.{name}" if self.place else name

    def refuse_unread(self, key: str, choice: Any) -> None:
        """Raise ``ConfigError`` if an option is set that has no effect when ``key=choice``."""
        for name, spec, _ in self.options():
            if spec.read_by is not None and spec.read_by.key == key and choice not in spec.read_by:
                why = f"{key}={override_text(choice)} does not read it (read by {spec.read_by})"
                self.require_default(name, why)

    def require_default(self, name: str, why: str) -> None:
        """Raise ``ConfigError`` with the reason ``why`` unless an option is at its default."""
        value, default = getattr(self, name), options(type(self))[name].default
        require(
            value == default,
            f"{self.key(name)}={override_text(value)}: {why}; leave it {override_text(default)}",
        )

    def options(self) -> Iterator[tuple[str, Option, Any]]:
        """Yield the name, metadata and value of each of the group's options."""
        for name, spec in options(type(self)).items():
            yield name, spec, getattr(self, name)

    def groups(self) -> Iterator[Group]:
        """Yield this group and every group that is a field of a yielded one; none in lists."""
        yield self
        for value in vars(self).values():
            if isinstance(value, Group):
                yield from value.groups()
