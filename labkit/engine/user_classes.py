"""User-defined classes, named in the config as ``package.module:Class``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from labkit.machine.exception_text import one_line_with_type


class UserClassError(RuntimeError):
    """A method of a user's class failed or returned something wrong. The message is one line."""


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
        raise ValueError(f"{key}={path}: the class needs an attribute `name`, a string")
    for method in methods:
        if not callable(getattr(instance, method, None)):
            raise ValueError(f"{key}={path}: the class has no method {method}()")
    return instance


def guard_method(
    instance: Any, where: str, method: str, mistake: Callable[..., str | None] | None = None
) -> None:
    """Replace a method of a user's instance by one whose errors are one line that begins ``where``.

    ``MemoryError`` and the exceptions that labkit defines pass unchanged.

    Parameters
    ----------
    instance
        The instance, whose attribute ``method`` is set.
    where
        The option and its value, ``key=package.module:Class``, with which messages begin.
    method
        The method's name. The guarded method raises ``UserClassError``.
    mistake
        A function of the result and the arguments. It returns None if the result is right, else a
        phrase on what the method must return.
    """
    own = getattr(instance, method)

    @functools.wraps(own)
    def guarded(*args: Any, **options: Any) -> Any:
        try:
            result = own(*args, **options)
        except Exception as error:
            if isinstance(error, MemoryError) or type(error).__module__.startswith("labkit."):
                raise
            raise UserClassError(f"{where}: {method}() {one_line_with_type(error)}") from error
        wrong = None if mistake is None else mistake(result, *args)
        if wrong is not None:
            raise UserClassError(f"{where}: {method}() must return {wrong}")
        return result

    setattr(instance, method, guarded)
