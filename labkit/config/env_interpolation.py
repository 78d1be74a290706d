"""Texts of a config that name environment variables, such as ``${oc.env:SERVER_URL}``.

The value is used, and may be a secret. Files of a study hold the expression instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from labkit.config.option import require

EXPRESSION = re.compile(r"\$\{oc\.env:(\w+)\}")
MIN_HIDDEN = 4  # characters: shorter values are no secrets, and stand in many other words


class EnvironmentText(str):
    """A text with the values of its variables. ``expression`` is what files hold of it.

    In an f-string, which makes a message, it is its expression.
    """

    expression: str

    def __format__(self, spec: str) -> str:
        return format(self.expression, spec)

    @classmethod
    def of(cls, expression: str) -> EnvironmentText:
        """Return the text of an expression; raise ``ConfigError`` if a variable is not set."""
        text = cls(EXPRESSION.sub(_value, expression))
        text.expression = expression
        return text


def _value(match: re.Match[str]) -> str:
    name = match.group(1)
    require(name in os.environ, f"{match.group()}: the environment variable {name} is not set")
    return os.environ[name]


def with_values(plain: Any) -> Any:
    """Return JSON values with the variables' values in place of their expressions."""
    return map_texts(plain, lambda text: str(EnvironmentText.of(text)))


def hide_values(data: Any, plain: Any, public: Sequence[str] = ()) -> Any:
    """Return JSON values, such as those of a record, without those of variables in a config.

    ``plain``: the config, in JSON types. ``public``: names that show everybody the values that they
    contain, so these are not hidden.
    """
    hidden = {
        value: expression
        for value, expression in _values(plain)
        if not any(value in name for name in public)
    }
    if not hidden:
        return data
    # The longest first: a password within a URL is hidden with the URL.
    pattern = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))
    return map_texts(data, lambda text: pattern.sub(lambda found: hidden[found.group()], text))


def _values(plain: Any) -> Iterator[tuple[str, str]]:
    """Yield the values to hide, and the password in a value that is a URL."""
    for match in EXPRESSION.finditer(str(plain)):
        value = os.environ.get(match.group(1), "")
        url = urlsplit(value) if "://" in value else None
        for part in (value, *((url.password, url.query) if url else ())):
            if part and len(part) >= MIN_HIDDEN:
                yield part, match.group()


def map_texts(data: Any, change: Callable[[str], str]) -> Any:
    """Return JSON values with every text changed; keys stay."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_texts(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [map_texts(value, change) for value in data]
    return data
