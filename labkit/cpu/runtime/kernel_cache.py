"""numba's cache of machine code on disk, one folder per module and state of its sources.

numba (0.68) reuses the machine code of a function as long as the content of the function's own
file, numba and the CPU are the same. But that code also contains functions and constants of other
files. So the folder of a module's kernels is named by a digest of all files that the module imports
from labkit. A changed file then recompiles the kernels that contain it and no others; checkouts and
revisions whose sources are equal share their kernels.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching
from numba.core.runtime import rtsys

from labkit.machine import cache_entries, source_dependency_digest

_PACKAGE = Path(__file__).resolve().parents[2]
_save = caching.IndexDataCacheFile.save


class SourcesLocator(caching.UserProvidedCacheLocator):  # type: ignore[misc]  # numba is untyped
    """The cache folder of a function, named by its module and a digest of the sources."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._cache_path = str(_folder(Path(py_file).resolve(), Path(numba.config.CACHE_DIR)))

    def ensure_cache_path(self) -> None:
        """Make the folder, or raise ``CacheError``: numba would choose one not named by sources."""
        with cache_entries.one_line_errors(Path(self._cache_path)):
            super().ensure_cache_path()


@cache
def _folder(file: Path, root: Path) -> Path:
    return root / f"{file.stem}-{source_dependency_digest.digest(file, _PACKAGE)}"


def install() -> None:
    """Make numba cache in this folder. Call this before a function is decorated to be cached."""
    if not numba.config.CACHE_DIR:
        numba.config.CACHE_DIR = str(cache_entries.numba_cache_dir())
    if SourcesLocator not in caching.CacheImpl._locator_classes:
        caching.CacheImpl._locator_classes.insert(0, SourcesLocator)
    caching.Cache.load_overload = _load_machine_code
    caching.IndexDataCacheFile.save = _save_locked


def _load_machine_code(cache: Any, types: Any, target: Any) -> Any:
    """Load a kernel from numba's cache after initialising only numba's runtime.

    numba (0.68) would first load its implementations of Python's and NumPy's functions, which takes
    0.08 of 0.4 s in a process that compiles nothing. A later compilation loads them anyway.
    """
    rtsys.initialize(target)
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(types, target)


def _save_locked(file: Any, key: Any, data: Any) -> None:
    """Save a kernel to numba's cache under a lock that all processes share.

    numba (0.68) reads the cache's index, adds an entry and writes the index back. Without the lock,
    two processes that save at the same time could give two kernels the same name, or lose one.
    """
    path = Path(file._cache_path) / "saving"
    with cache_entries.full_disk_named(path), path.open("a", encoding="utf-8") as lock:
        cache_entries.wait_for_lock(lock)
        _save(file, key, data)
