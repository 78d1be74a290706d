"""The package's files that numba's machine code is made of, found by their imports.

A module that imports numba or llvmlite compiles something, and what it compiles in (a
function, a constant) lies in itself or in what it imports. So the files are those modules
and all that they import from the package, directly or not.

Only imports at the left margin count: what a function imports it uses when it is called,
and the type checker's names are no values. Regular expressions read them, for parsing the
package takes a third of a second and every run asks; a test compares both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Each begins with the end of the line before, which is found in half the time of ``^``.
_NUMBA_IMPORT = re.compile(rb"\n(?:from|import) +(?:numba|llvmlite)\b")
_IMPORT = re.compile(rb"\n(?:from +([\w.]+) +import +(\([^)]*\)|[^\n]*)|import +([^\n]*))")


def read_sources(package: Path) -> dict[str, bytes]:
    """Return the files' content by their path from the package's parent on, sorted.

    Parameters
    ----------
    package
        The folder of the package; nothing in it is imported.
    """
    texts = dict(sorted(_read_tree(str(package), package.name)))
    found: set[str] = set()
    waiting = [path for path, text in texts.items() if _NUMBA_IMPORT.search(b"\n" + text)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imported_files(texts[path], texts)
    return {path: text for path, text in texts.items() if path in found}


def imported_files(text: bytes, files: Mapping[str, object]) -> set[str]:
    """Return which of ``files`` (keys as ``read_sources`` returns them) a source imports."""
    stems = [module.replace(".", "/") for module in _module_names(text)]
    paths = {f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")}
    return {path for path in paths if path in files}


def _module_names(text: bytes) -> Iterator[str]:
    """Yield what may be the names of modules: of ``from a import b`` both ``a`` and ``a.b``."""
    for match in _IMPORT.finditer(b"\n" + text):
        module, names, modules = (part.decode() if part else "" for part in match.groups())
        if module:
            yield module
        for name in (names or modules).strip("()").split(","):
            first = name.split("#")[0].split()[:1]
            yield from (f"{module}.{word}" if module else word for word in first)


def _read_tree(folder: str, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield every source file's path and content."""
    for entry in os.scandir(folder):
        path = f"{name}/{entry.name}"
        if entry.name.endswith(".py"):
            with open(entry.path, "rb", buffering=0) as file:
                yield path, file.read()
        elif entry.name != "__pycache__" and entry.is_dir():
            yield from _read_tree(entry.path, path)
