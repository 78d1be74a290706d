"""Where numba caches kernels, and that no kernel outlives a change of what it contains."""

import errno
import fcntl
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
from numba.core import caching
from numba.core.registry import CPUDispatcher

import labkit.cpu
from labkit.cpu.attention import tiled_attention_kernel
from labkit.cpu.layers import norms
from labkit.cpu.runtime import kernel_cache, thread_pool
from labkit.experiment.worker import run_failures
from labkit.machine import cache_entries, source_dependency_digest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "labkit"


def cpu_modules():
    thread_pool.install()  # before the import of its code, which is linked to its memory
    modules = pkgutil.walk_packages(labkit.cpu.__path__, "labkit.cpu.")
    return [importlib.import_module(module.name) for module in modules]


def functions_in(dispatcher):
    """Yield the labkit functions that a compiled function's code refers to, at any depth."""
    queue, seen = [dispatcher], set()
    while queue:
        function = queue.pop()
        function = getattr(function, "py_func", None) or getattr(function, "_defn", function)
        code = getattr(function, "__code__", None)
        if code is None or function in seen or not function.__module__.startswith("labkit."):
            continue
        seen.add(function)
        yield function
        queue += [
            function.__globals__[name] for name in code.co_names if name in function.__globals__
        ]
        queue += [cell.cell_contents for cell in function.__closure__ or ()]


def test_every_function_that_a_kernel_contains_is_in_the_digest():
    kernels = [
        value
        for module in cpu_modules()
        for value in vars(module).values()
        if isinstance(value, CPUDispatcher) and value.__module__ == module.__name__
    ]
    assert len(kernels) > 50
    for kernel in kernels:
        sources = source_dependency_digest.read_sources(
            Path(kernel.py_func.__code__.co_filename), PACKAGE
        )
        for function in functions_in(kernel):
            path = Path(function.__code__.co_filename).relative_to(CHECKOUT).as_posix()
            assert path in sources, f"{kernel.__name__} contains {function.__name__}"


def test_intrinsics_of_one_decorator_are_all_walked():
    """They share their code object, which is the decorator's."""
    names = {function.__code__.co_name for function in functions_in(tiled_attention_kernel.attend)}
    assert {"transpose_strip", "copy_widened", "scores_tile"} <= names


def test_a_kernel_is_cached_under_its_module_and_digest():
    digest = source_dependency_digest.digest(Path(norms.__file__), PACKAGE)
    path = Path(norms._rms_norm._cache.cache_path)
    assert path == cache_entries.numba_cache_dir() / f"norms-{digest}"


def test_a_kernel_that_fills_the_disk_names_the_folder(tmp_path, monkeypatch):
    def fill(file, key, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # numba's temporary file has no name

    monkeypatch.setattr(kernel_cache, "_save", fill)
    with pytest.raises(
        cache_entries.CacheError, match=re.escape(f"cannot write {tmp_path}: No space")
    ):
        kernel_cache._save_locked(SimpleNamespace(_cache_path=tmp_path), "key", b"")


def test_equal_sources_share_kernels_whenever_they_were_written(tmp_path):
    """Numba 0.67 and earlier compare the times of files."""

    def written(folder, time):
        file = tmp_path / folder / "module.py"
        file.parent.mkdir()
        file.write_text("one = 1\n")
        os.utime(file, (time, time))
        locator = kernel_cache.SourcesLocator(written, str(file))
        return locator.get_cache_path(), locator.get_source_stamp()

    kernel_cache.install()
    assert written("clone", 1e9) == written("tree", 2e9)


def test_a_kernel_is_cached_nowhere_else(tmp_path, monkeypatch):
    """Elsewhere numba would stamp it with its own file alone."""

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(caching.tempfile, "TemporaryFile", read_only)
    line = f"cannot write {tmp_path / 'numba'}: Read-only file system; set LABKIT_CACHE to a folder"
    with pytest.raises(cache_entries.CacheError, match=re.escape(line)) as refused:
        numba.njit(cache=True)(lambda x: x)
    assert run_failures.failure_of(refused.value, "numba").outcome == "refused"


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        cache_entries.CacheError, match=r"cannot lock .*: No locks available; set LABKIT_"
    ):
        kernel_cache._save_locked(SimpleNamespace(_cache_path=tmp_path), "key", b"")


def test_every_module_that_caches_machine_code_imports_the_pool_first():
    pool, code = "labkit/cpu/runtime/thread_pool.py", "labkit/cpu/runtime/compiled_thread_pool.py"
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    caching_modules = [path for path, text in texts.items() if re.search(r"\bcache=True\b", text)]
    assert len(caching_modules) == 3
    for path in caching_modules:
        # The pool imports its code inside a function, after it has set the folder.
        assert (
            pool in source_dependency_digest.read_sources(path, PACKAGE) or path == CHECKOUT / code
        ), path
    importers = [path for path, text in texts.items() if "import compiled_thread_pool" in text]
    assert importers == [CHECKOUT / pool]


LOADED = """
import sys
import numpy as np
import numba
from labkit.cpu.runtime import thread_pool

@thread_pool.kernel()
def squares(n):
    out = np.empty(n)
    for i in numba.prange(n):
        out[i] = i * i
    return out

print(squares(4).tolist(), "numba.typed.dictobject" in sys.modules)
middle = numba.njit(lambda n: np.median(np.arange(n)) + len({i: "x" for i in range(n)}))
print(middle(3), "numba.typed.dictobject" in sys.modules)
"""


@pytest.mark.slow
def test_modules_that_only_compilation_needs_load_when_something_compiles(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADED)
    folders = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PYTHONPATH": str(CHECKOUT)}
    for known in ("True", "False"):
        done = subprocess.run(
            [sys.executable, script], env=os.environ | folders, capture_output=True, text=True
        )
        expected = [f"[0.0, 1.0, 4.0, 9.0] {known}", "4.0 True", ""]
        assert done.stdout.split("\n") == expected, done.stderr


def test_kernels_are_saved_by_one_process_at_a_time(tmp_path):
    """Two at once would give one name to two signatures: one would run the other's code."""
    kernel_cache.install()
    file = caching.IndexDataCacheFile(str(tmp_path), "kernel", ("stamp", 1))
    with open(tmp_path / "saving", "a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        saving = threading.Thread(target=file.save, args=("a signature", b"its code"))
        saving.start()
        saving.join(0.2)
        assert saving.is_alive() and file.load("a signature") is None
    saving.join(10)
    assert file.load("a signature") == b"its code"
