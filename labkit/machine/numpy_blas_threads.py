"""Run NumPy's own OpenBLAS on one thread within a ``with`` block."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FOLDERS = ("../numpy.libs", ".dylibs")  # beside the package in wheels for Linux and macOS
PREFIX, SUFFIX = "scipy_openblas_", "64_"  # of the names that NumPy's OpenBLAS exports
# The number of threads is one setting of the process, so only one context may change it at a time.
_lock = threading.Lock()


@contextmanager
def single_thread() -> Iterator[None]:
    """Let NumPy's OpenBLAS compute on one thread inside the context.

    OpenBLAS's threads spin while they wait for each other. On two cores beside a busy process, 211
    products of 44 rows took 5.3 s with two threads and 0.2 s with one. If NumPy was built with
    another BLAS, such as Accelerate, its threads stay as they are.
    """
    library = _openblas()
    if library is None:
        yield
        return
    get_threads = getattr(library, f"{PREFIX}get_num_threads{SUFFIX}")
    set_threads = getattr(library, f"{PREFIX}set_num_threads{SUFFIX}")
    with _lock:
        before = int(get_threads())
        set_threads(1)
        try:
            yield
        finally:
            set_threads(before)


def _openblas() -> ctypes.CDLL | None:
    """Return the library that NumPy has loaded, or None if NumPy does not ship OpenBLAS."""
    package = Path(np.__file__).parent
    paths = (path for folder in FOLDERS for path in (package / folder).glob("*scipy_openblas64_*"))
    path = next(paths, None)
    return None if path is None else ctypes.CDLL(str(path.resolve()))
