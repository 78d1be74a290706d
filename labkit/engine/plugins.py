"""A strategy of the user's own, named in the config as ``package.module:Class``."""

from __future__ import annotations

import importlib
from typing import Any

from labkit.machine.exception_text import one_line_with_type


def create_plugin(key: str, path: str, methods: tuple[str, ...], *args: Any, **options: Any) -> Any:
    """Import a class, make an instance and check that it can play its part.

    Parameters
    ----------
    key
        The option that names the class, for the refusal.
    path
        ``package.module:Class``.
    methods
        What the instance must have, besides a ``name`` that is a word.
    *args, **options
        What the class is made with.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    module, _, attribute = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)(*args, **options)
    except Exception as error:
        raise ValueError(f"{key}={path}: {said(error)}") from error
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{key}={path}: the class has no `name` (a word)")
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise ValueError(f"{key}={path}: the class has no method {method}()")
    return made


def said(error: Exception) -> str:
    """Say an exception in one line."""
    return one_line_with_type(error)
