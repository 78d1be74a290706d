"""What every part of the schema is checked with."""

from __future__ import annotations

SCHEMA_VERSION = 1


class ConfigError(ValueError):
    """A mistake in the configuration, said in one line."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def is_class_path(text: str) -> bool:
    """Tell whether ``text`` looks like ``package.module:Class``."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def require_strategy(key: str, value: str, words: tuple[str, ...]) -> None:
    """Check that a strategy is one of ``words`` or looks like a user's own class."""
    require(
        value in words or is_class_path(value),
        f"{key}={value}: allowed are {', '.join(words)} or package.module:Class",
    )
