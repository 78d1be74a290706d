"""The thread pool of every numba kernel, and the decorator that puts a kernel on it.

numba's generated loops call a *threading layer* by name: ``numba_parallel_for`` and a few
more. This is one whose launches do not wait for a thread that the system keeps from its
core (``labkit.cpu.thread_pool_code`` says how).
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import caching
from numba.core.runtime import rtsys

BYTES = 1 << 20  # of the pool's memory
MAX_THREADS = 2048


@dataclass(frozen=True, slots=True)
class PoolTuning:
    """How the pool shares work and waits; durations in microseconds.

    Parameters
    ----------
    grain
        Pieces per thread of a plain range: what a thread that is put aside has begun, and
        the others must wait for, is short.
    spin_us
        A worker without work spins for so long, then sleeps: longer than the host needs
        between two launches of a step.
    aside_us
        What an interrupt does not take and another process's time slice exceeds. A worker
        that sees its clock jump so far while it spins was put aside: the pool is crowded. A
        caller that has waited so long for begun work sleeps: whoever has it may need the core.
    crowded_us
        For how long a pool is then held to be crowded.
    crowded_spin_us
        How long a worker spins in it: more would cost the time slice that the work needs.
    """

    grain: int = 4
    spin_us: int = 2_000
    aside_us: int = 500
    crowded_us: int = 100_000
    crowded_spin_us: int = 50


def kernel(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a launch: parallel, on this pool, cached on disk, without the interpreter lock.

    Parameters
    ----------
    *signature
        The types, for a kernel that is compiled when its module is imported.
    **options
        numba's.
    """
    install()
    compile_: Callable[[Callable[..., Any]], Any] = numba.njit(
        *signature, parallel=True, nogil=True, cache=True, **options
    )
    return compile_


@cache
def install() -> Pool:
    """Start the pool and have numba use it; every call returns the same one.

    It has as many threads as ``NUMBA_NUM_THREADS``, the caller of a kernel included; a
    kernel uses ``numba.get_num_threads()`` of them. What numba linked before keeps the
    layer that it has.

    Raises
    ------
    OSError
        The system gave no memory or no thread.
    """
    if numba.config.THREADING_LAYER == "default":
        # The layer below keeps the counts of threads; this one's own threads only sleep.
        numba.config.THREADING_LAYER = "workqueue"
    numba.get_num_threads()
    caching.Cache.load_overload = _load_machine_code
    caching.IndexDataCacheFile.save = _save_in_turn
    return Pool(numba.config.NUMBA_NUM_THREADS)


def _load_machine_code(cache: Any, types: Any, target: Any) -> Any:
    """Load a kernel from numba's cache, with numba's runtime and nothing else.

    numba loads, before it, all that a kernel can be compiled from: Python's and NumPy's
    functions, which takes 0.08 of 0.4 s of a process that compiles nothing (0.68). What does
    compile loads them by itself.
    """
    rtsys.initialize(target)
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(types, target)


_save = caching.IndexDataCacheFile.save


def _save_in_turn(file: Any, key: Any, data: Any) -> None:
    """Save a kernel to numba's cache, one process at a time.

    numba reads the index, adds a name and writes the index again (0.68): two processes that do so
    at once give one name to two kernels, or lose one.
    """
    with open(Path(file._cache_path) / "saving", "a", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _save(file, key, data)


class Pool:
    """Threads that take the units of a job by ticket, its caller among them.

    Parameters
    ----------
    threads
        How many at most, the caller included.

    Raises
    ------
    OSError
        The system gave no memory or no thread.
    """

    def __init__(self, threads: int) -> None:
        self._libc = ctypes.CDLL(None)
        self._memory = _reserve(self._libc, threads)
        self._code = _link(self._memory)
        self._workers = range(threads - 1)
        self._rule = PoolTuning()
        self._threads: list[ctypes.c_void_p] = []
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self.close)

    @property
    def facts(self) -> dict[str, object]:
        """What a record says: the pool's name, its threads with the caller, and its rule."""
        return {"name": "labkit", "threads": len(self._workers) + 1, **asdict(self._rule)}

    @property
    def threads(self) -> tuple[int, ...]:
        """The running workers, each a ``pthread_t``."""
        return tuple(thread.value or 0 for thread in self._threads)

    def close(self) -> None:
        """End the workers after what they are at; kernels then run on their caller alone."""
        self._write(self._code.STOP, 1)
        for k, thread in enumerate(self._threads):
            lock = self._own(k, self._code.OWN_LOCK)
            self._libc.pthread_mutex_lock(lock)
            self._libc.pthread_mutex_unlock(lock)
            self._libc.pthread_cond_signal(self._own(k, self._code.WAKE_UP))
            self._libc.pthread_join(thread, None)
        self._threads = []
        self._write(self._code.WORKERS, 0)

    def _start(self) -> None:
        """Start the workers on clean memory, in a forked process as in a new one."""
        code, libc = self._code, self._libc
        ctypes.memset(self._memory, 0, 8 * self._word(len(self._workers)))
        for word, value in asdict(self._rule).items():
            self._write(getattr(code, word.upper()), value)
        locks = [self._at(code.LOCK), *(self._own(k, code.OWN_LOCK) for k in self._workers)]
        signals = [self._at(code.DONE), *(self._own(k, code.WAKE_UP) for k in self._workers)]
        for lock, signal in zip(locks, signals, strict=True):
            _check(libc.pthread_mutex_init(lock, None))
            _check(libc.pthread_cond_init(signal, None))
        self._threads = [ctypes.c_void_p() for _ in self._workers]
        run = ctypes.c_void_p(code.worker.address)
        for k, thread in enumerate(self._threads):
            _check(libc.pthread_create(ctypes.byref(thread), None, run, ctypes.c_void_p(k + 1)))
        self._write(code.WORKERS, len(self._threads))

    def _at(self, word: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory + 8 * word)

    def _own(self, k: int, word: int) -> ctypes.c_void_p:
        return self._at(self._word(k) + word)

    def _word(self, k: int) -> int:
        """Return the first word of worker k, from 0."""
        first, each = self._code.FIRST_WORKER, self._code.WORKER_WORDS
        return int(first + k * each)

    def _write(self, word: int, value: int) -> None:
        ctypes.c_int64.from_address(self._memory + 8 * word).value = value


def _reserve(libc: ctypes.CDLL, threads: int) -> int:
    """Return the address of zeros that are never freed: a thread may outlive Python."""
    if not 1 <= threads <= MAX_THREADS:
        raise OSError(errno.EAGAIN, f"{threads} threads: a pool has 1 to {MAX_THREADS}")
    libc.calloc.restype = ctypes.c_void_p
    memory: int | None = libc.calloc(BYTES, 1)
    if memory is None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return memory


def _link(memory: int) -> ModuleType:
    """Compile the pool's code, or load it, and put it in the place of numba's layer."""
    llvm.add_symbol("labkit_pool", memory)
    from labkit.cpu import thread_pool_code

    llvm.add_symbol("numba_parallel_for", thread_pool_code.parallel_for.address)
    llvm.add_symbol("get_thread_id", thread_pool_code.thread_id.address)
    llvm.add_symbol("get_sched_size", thread_pool_code.pieces.address)
    for name in ("do_scheduling_signed", "do_scheduling_unsigned"):
        llvm.add_symbol(name, thread_pool_code.cut.address)
    return thread_pool_code


def _check(status: int) -> None:
    if status != 0:
        raise OSError(status, os.strerror(status))
