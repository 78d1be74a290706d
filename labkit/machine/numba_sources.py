"""The package's source files that numba's compiled code depends on, found by their imports.

A module that imports numba or llvmlite compiles functions. The compiled functions and constants are
defined in that module or in modules that it imports. So the files are those modules and everything
that they import from the package, directly or indirectly.

Only imports at module level count: an import inside a function is executed when the function is
called, and an import under ``TYPE_CHECKING`` is never executed. The imports are found with regular
expressions, because parsing the package takes a third of a second and every run needs the list. A
test compares the result with that of Python's parser.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Each pattern starts with the preceding line end, which is twice as fast as ``^``.
_NUMBA_IMPORT = re.compile(rb"\n(?:from|import) +(?:numba|llvmlite)\b")
_IMPORT = re.compile(rb"\n(?:from +([\w.]+) +import +(\([^)]*\)|[^\n]*)|import +([^\n]*))")


def read_sources(package: Path) -> dict[str, bytes]:
    """Return the content of the source files that compiled code depends on, sorted by path.

    The keys are paths such as ``labkit/cpu/packed_linear.py``.

    Parameters
    ----------
    package
        The package's folder. Its modules are not imported.
    """
    texts = dict(sorted(_read_tree(str(package), package.name)))
    dependencies: set[str] = set()
    queue = [path for path, text in texts.items() if _NUMBA_IMPORT.search(b"\n" + text)]
    while queue:
        path = queue.pop()
        if path not in dependencies:
            dependencies.add(path)
            queue += imported_files(texts[path], texts)
    return {path: text for path, text in texts.items() if path in dependencies}


def imported_files(text: bytes, files: Mapping[str, object]) -> set[str]:
    """Return the paths in ``files`` (as in ``read_sources``) that the source ``text`` imports."""
    stems = [module.replace(".", "/") for module in _module_names(text)]
    paths = {f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")}
    return {path for path in paths if path in files}


def _module_names(text: bytes) -> Iterator[str]:
    """Yield the modules that a source may import: ``from a import b`` gives ``a`` and ``a.b``."""
    for match in _IMPORT.finditer(b"\n" + text):
        module, names, modules = (part.decode() if part else "" for part in match.groups())
        if module:
            yield module
        for name in (names or modules).strip("()").split(","):
            first = name.split("#")[0].split()[:1]
            yield from (f"{module}.{word}" if module else word for word in first)


def _read_tree(folder: str, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of every source file in a folder tree."""
    for entry in os.scandir(folder):
        path = f"{name}/{entry.name}"
        if entry.name.endswith(".py"):
            with open(entry.path, "rb", buffering=0) as file:
                yield path, file.read()
        elif entry.name != "__pycache__" and entry.is_dir():
            yield from _read_tree(entry.path, path)
