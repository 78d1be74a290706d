"""User-defined classes, named in the config as ``package.module:Class``."""

from __future__ import annotations

import importlib
from typing import Any

from labkit.machine.exception_text import one_line_with_type


def create_plugin(key: str, path: str, methods: tuple[str, ...], *args: Any, **options: Any) -> Any:
    """Import a class, create an instance, and check its ``name`` and its methods.

    Parameters
    ----------
    key
        The option that names the class, for messages.
    path
        ``package.module:Class``.
    methods
        Methods that the instance must have, besides a non-empty ``name``.
    *args, **options
        Arguments of the class.

    Raises
    ------
    ValueError
        The class cannot be imported or called, or lacks ``name`` or a method.
    """
    module, _, attribute = path.partition(":")
    try:
        instance = getattr(importlib.import_module(module), attribute)(*args, **options)
    except Exception as error:
        raise ValueError(f"{key}={path}: {one_line_with_type(error)}") from error
    name = getattr(instance, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{key}={path}: the class has no attribute `name` (a word)")
    for method in methods:
        if not callable(getattr(instance, method, None)):
            raise ValueError(f"{key}={path}: the class has no method {method}()")
    return instance
