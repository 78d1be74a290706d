"""The source files that a module's compiled code depends on, found by their imports.

A function that numba compiles contains functions and constants of its own module and of modules
that it imports. numba notices only a change of the function's own file, so labkit names the folder
of a module's machine code by a digest of all of these files
(:mod:`labkit.cpu.runtime.kernel_cache`).

Only imports at module level count: an import inside a function is executed when the function is
called, and an import under ``TYPE_CHECKING`` is never executed. The imports are found with regular
expressions, because parsing takes many times as long and every process needs the digests. A test
compares the result with that of Python's parser.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# The pattern starts with the preceding line end, which is twice as fast as ``^``.
_IMPORT = re.compile(rb"\n(?:from +([\w.]+) +import +(\([^)]*\)|[^\n]*)|import +([^\n]*))")

# Code that kernels call without importing it: the resolvers, which the CPU backend registers.
_RESOLVERS = "labkit/engine/attention/sequence_resolvers/__init__.py"
_REGISTERED = {"labkit/cpu/attention/resolver_variants.py": _RESOLVERS}
# Facts and folders of the machine, which no kernel contains (a test holds that).
_NEVER_COMPILED = "labkit/machine/"


def digest(file: Path, package: Path) -> str:
    """Return a digest of everything that the code compiled from ``file`` depends on.

    It is equal for equal sources, wherever they lie: checkouts and revisions share machine code.
    ``file``: a module of the package, or any other source file that imports some. ``package``: the
    folder of labkit's package. Its modules are not imported.
    """
    sources = read_sources(file, package)
    result = hashlib.sha256()
    for path, text in sorted(sources.items()):
        result.update(path.encode() + b"\0" + text + b"\0")
    return result.hexdigest()[:16]


def read_sources(file: Path, package: Path) -> dict[str, bytes]:
    """Return the content of ``file`` and of the package's files that it imports, at any depth.

    The keys are paths such as ``labkit/cpu/matmul/packed_linear.py``; a file outside the package
    has its name as the key.
    """
    own = file.relative_to(package.parent).as_posix() if package in file.parents else file.name
    sources: dict[str, bytes] = {}
    queue = [(own, file)]
    while queue:
        name, path = queue.pop()
        if name not in sources:
            sources[name], imported = _load(path, package)
            queue += [(other, package.parent / other) for other in imported]
            if name in _REGISTERED:
                queue.append((_REGISTERED[name], package.parent / _REGISTERED[name]))
    return sources


def imported_files(text: bytes, package: Path) -> set[str]:
    """Return the files of the package that the source ``text`` imports, as in ``read_sources``."""
    stems = [module.replace(".", "/") for module in _module_names(text)]
    inside = [stem for stem in stems if stem.split("/")[0] == package.name]
    paths = {f"{stem}{end}" for stem in inside for end in (".py", "/__init__.py")}
    return {path for path in paths if (package.parent / path).is_file()}


@cache
def _load(path: Path, package: Path) -> tuple[bytes, frozenset[str]]:
    text = path.read_bytes()
    imported = imported_files(text, package)
    return text, frozenset(name for name in imported if not name.startswith(_NEVER_COMPILED))


def _module_names(text: bytes) -> Iterator[str]:
    """Yield the modules that a source may import: ``from a import b`` gives ``a`` and ``a.b``."""
    for match in _IMPORT.finditer(b"\n" + text):
        module, names, modules = (part.decode() if part else "" for part in match.groups())
        if module:
            yield module
        for name in (names or modules).strip("()").split(","):
            first = name.split("#")[0].split()[:1]
            yield from (f"{module}.{word}" if module else word for word in first)
