"""User-defined classes, named in the config as ``package.module:Class``."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import linecache
import math
import sysconfig
from collections.abc import Callable
from importlib import metadata
from numbers import Real
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.machine.exception_text import one_line_with_type

MAX_SOURCE_CHARS = 100  # of a line of code in a message


class UserClassError(RuntimeError):
    """A method of a user's class failed or returned something wrong. The message is one line.

    ``path`` names the class as ``package.module:Class``.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def describe_error(error: BaseException, path: str) -> str:
    """Return an error in one line, followed by the last line of the user's code in its traceback.

    For example ``KeyError: 'x' (mine/maps.py:7, in maps: return table['x'])``. A line is the user's
    own if it is in the class's package. ``path`` names the class as ``package.module:Class``.
    """
    place = own_line(error, path)
    return one_line_with_type(error) + (f" ({place})" if place else "")


def is_own_frame(frame: FrameType, path: str) -> bool:
    """Return whether a frame runs code of the package of the class ``package.module:Class``."""
    package = path.partition(":")[0].split(".")[0]
    return str(frame.f_globals.get("__name__")).split(".")[0] == package


def own_line(error: BaseException, path: str) -> str | None:
    """Return the last line of the traceback in the class's own package, or None."""
    found, step = None, error.__traceback__
    while step is not None:
        if is_own_frame(step.tb_frame, path):
            found = step
        step = step.tb_next
    if found is None:
        return None
    code, line = found.tb_frame.f_code, found.tb_lineno
    source = linecache.getline(code.co_filename, line).strip()[:MAX_SOURCE_CHARS]
    file = Path(code.co_filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{line}, in {code.co_name}: {source}"


def import_error(path: str) -> str | None:
    """Import the class ``package.module:Class``; return the error in one line, or None."""
    module, _, attribute = path.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)
    except Exception as error:
        return describe_error(error, path)
    return None


def create_plugin(key: str, path: str, methods: tuple[str, ...], *args: Any, **options: Any) -> Any:
    """Import a class, create an instance, and check its ``name`` and its methods.

    ``key`` is the option that names the class ``path`` (``package.module:Class``), for messages.
    ``args`` and ``options`` are the arguments of the class. Raises ``ValueError`` if it cannot be
    imported or called, or its instance lacks a non-empty ``name`` or one of ``methods``.
    """
    module, _, attribute = path.partition(":")
    try:
        instance = getattr(importlib.import_module(module), attribute)(*args, **options)
    except Exception as error:
        raise ValueError(f"{key}={path}: {describe_error(error, path)}") from error
    name = getattr(instance, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{key}={path}: the class needs an attribute `name`, a string")
    for method in methods:
        if not callable(getattr(instance, method, None)):
            raise ValueError(f"{key}={path}: the class has no method {method}()")
    return instance


def source_files(module: str) -> dict[str, Path]:
    """Return the files of a class's package, or of its module and the modules beside it it imports.

    The keys are paths relative to the folders from which Python imports them, in order. labkit and
    installed modules have versions (:func:`installed_versions`), and are left out.
    """
    top = module.partition(".")[0]
    installed = [
        Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")
    ]
    roots = [
        place.parent
        for place in _places(top)
        if not any(place.is_relative_to(folder) for folder in installed)
    ]
    found: dict[str, Path] = {}
    names, seen = [top], {"labkit"}
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for root in roots:  # of two files of one name Python imports that of the first folder
            for file in _files(root, name):
                found.setdefault(file.relative_to(root).as_posix(), file)
                names += _imported(file)
    return dict(sorted(found.items()))


def installed_versions(module: str) -> dict[str, str]:
    """Return the versions of the distributions that installed a module, by their names.

    labkit, and a module with :func:`source_files`, have none.
    """
    top = module.partition(".")[0]
    if top == "labkit" or source_files(module):
        return {}
    names = sorted(set(metadata.packages_distributions().get(top, ())))
    return {name: metadata.version(name) for name in names}


def _places(module: str) -> list[Path]:
    """Return the folders of a package, several of a namespace package, or the file of a module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    file = [spec.origin] if spec.has_location and spec.origin else []
    return [Path(place).resolve() for place in spec.submodule_search_locations or file]


def _files(root: Path, name: str) -> list[Path]:
    """Return the files of a module or package, without the hidden ones of editors."""
    files = [root / f"{name}.py", *(root / name).rglob("*.py")]
    return [
        file
        for file in files
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(root).parts)
    ]


def _imported(file: Path) -> set[str]:
    """Return the first names of the modules that a file imports, without its own package's."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError, OSError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.partition(".")[0] for name in names}


def finite_number_mistake(number: Any, *arguments: Any) -> str | None:
    """Return None if a method's result is a finite number, else what it must return."""
    try:
        is_finite = isinstance(number, Real) and math.isfinite(number)
    except OverflowError:
        return "a finite number, not an integer that no float can hold"
    return None if is_finite else f"a finite number, not {number!r}"


def guard_method(
    instance: Any, where: str, method: str, mistake: Callable[..., str | None] | None = None
) -> None:
    """Wrap a method of a user's instance: its errors become one line that begins with ``where``.

    These exceptions pass unchanged: ``MemoryError``, exceptions that labkit defines, and an
    exception of an inherited method if its traceback has no line of the user's package.

    ``where`` is the option and its value, ``key=package.module:Class``. The attribute ``method`` of
    the instance is set; it raises ``UserClassError``. ``mistake`` is a function of the result and
    the arguments: None if the result is right, else a phrase for what the method must return.
    """
    own, path = getattr(instance, method), where.partition("=")[2]

    @functools.wraps(own)
    def guarded(*args: Any, **options: Any) -> Any:
        try:
            result = own(*args, **options)
        except Exception as error:
            known = isinstance(error, MemoryError) or type(error).__module__.startswith("labkit.")
            inherited = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if known or (inherited and own_line(error, path) is None):
                raise
            described = describe_error(error, path)
            raise UserClassError(f"{where}: {method}() {described}", path) from error
        wrong = None if mistake is None else mistake(result, *args)
        if wrong is not None:
            raise UserClassError(f"{where}: {method}() must return {wrong}", path)
        return result

    try:
        object.__setattr__(instance, method, guarded)  # a frozen dataclass refuses setattr()
    except (AttributeError, TypeError):
        reason = "its methods cannot be wrapped; leave out __slots__ (slots=True)"
        raise UserClassError(f"{where}: {reason}", path) from None
