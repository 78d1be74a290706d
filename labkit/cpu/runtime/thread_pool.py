"""The thread pool of all numba kernels, and the decorator for kernels that run on it.

The loops that numba generates call a *threading layer* by symbol: ``numba_parallel_for`` and a few
more. This module replaces the threading layer by a pool whose launches do not wait for threads that
the operating system has suspended. ``labkit.cpu.runtime.compiled_thread_pool`` explains how.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.compiler_lock import global_compiler_lock

from labkit.cpu.runtime import host_target, kernel_cache
from labkit.cpu.runtime.numba_pipelines import KernelCompiler
from labkit.machine.worker_environment import TAKES_TURNS

# Every module that compiles or caches machine code imports this one first.
host_target.install()
kernel_cache.install()

POOL_BYTES = 1 << 20  # size of the pool's memory
MAX_THREADS = 2048
# A live arm's ``stopped_us``: longer than another process's time slice, and shorter than the slices
# of other arms, for which it is stopped (at least 30 ms:
# ``labkit.experiment.launch.turn_coordinator``).
STOPPED_US = 20_000
NEVER_US = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PoolTuning:
    """The pool's parameters: the division of work, and the times for which threads spin."""

    # Units per thread into which a ``prange`` is divided. All threads must wait for a unit that a
    # suspended thread has begun; more units make that wait shorter.
    grain: int = 4
    # How long a worker without work spins before it sleeps (us). This must be longer than the host
    # needs between two launches of a step.
    spin_us: int = 2_000
    # If the clock of a spinning worker jumps by more than this time (us), the worker counts as
    # having been suspended, and the pool as crowded. The time must be longer than any interrupt and
    # shorter than another process's time slice. A caller that has waited this long for units of
    # other workers goes to sleep, because these workers may need its core.
    aside_us: int = 500
    # A jump of more than this time (us) does not count. None: every longer jump counts, because
    # other processes or a quota may keep this one from its cores for any time.
    stopped_us: int | None = None
    # How long the pool counts as crowded after a worker was suspended (us).
    crowded_us: int = 100_000
    # How long a worker without work spins while the pool is crowded (us). A longer spin would use
    # up the time slice that the next job needs.
    crowded_spin_us: int = 50


def kernel(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel that runs on this pool and releases the interpreter lock. Cache it on disk.

    The kernel is compiled at its first call. ``*signature``: a numba signature. If it is given, the
    kernel has no other, and ``kernel.precompile()`` compiles it without a call. ``**options``:
    options of ``numba.njit``. Divisions are NumPy's: they do not raise.
    """
    choose_layer()
    compile_: Callable[[Callable[..., Any]], Any] = numba.njit(
        parallel=True,
        nogil=True,
        cache=True,
        no_cfunc_wrapper=True,
        pipeline_class=KernelCompiler,
        error_model="numpy",
        **options,
    )

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = compile_(function)
        dispatcher.compile = partial(_compile, dispatcher.compile)
        if signature:
            dispatcher.precompile = partial(_compile_only, dispatcher, *signature)
            dispatcher._compile_for_args = lambda *_: dispatcher.precompile()  # at the first call
        return dispatcher

    return decorate


def _compile(compile_: Callable[[Any], Any], signature: Any) -> Any:
    """Compile a kernel, or load it from the cache. Both link it to the pool."""
    install()
    return compile_(signature)


def _compile_only(dispatcher: Any, signature: str) -> Any:
    """Compile a kernel with its signature, and return what Python calls."""
    with global_compiler_lock:
        if dispatcher._can_compile:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
    (compiled,) = dispatcher.overloads.values()
    return compiled.entry_point


def choose_layer() -> None:
    """Make numba start its simplest threading layer, unless another is set or has started."""
    if numba.config.THREADING_LAYER == "default":
        # numba's own layer is still used to store the number of threads. Its threads only sleep.
        numba.config.THREADING_LAYER = "workqueue"
    numba.get_num_threads()


def install() -> Pool:
    """Start the pool and make numba use it. Every call returns the same pool.

    The pool has ``NUMBA_NUM_THREADS`` threads, including the thread that calls a kernel. A kernel
    uses ``numba.get_num_threads()`` of them. Kernels that numba linked before this call keep
    numba's own threading layer. Raises ``OSError`` if the operating system refused memory or a
    thread.
    """
    with global_compiler_lock:
        return _pool()


@cache
def _pool() -> Pool:
    choose_layer()
    return Pool(numba.config.NUMBA_NUM_THREADS)


def copy_num_threads() -> Callable[[], None]:
    """Return a function that sets the caller's ``numba.get_num_threads()`` in another thread.

    numba stores that number per thread, and a new thread starts with all threads of the pool.
    """
    count = numba.get_num_threads()
    return lambda: numba.set_num_threads(count)


class Pool:
    """Threads that take the units of a job from a shared counter. The caller takes units too.

    ``threads``: number of threads, including the caller. Raises ``OSError`` if the operating system
    refused memory or a thread.
    """

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise OSError(errno.EAGAIN, f"{threads} threads: must be 1 to {MAX_THREADS}")
        self._libc = ctypes.CDLL(None)
        self._memory = _reserve()
        self._code = _link(self._memory)
        self._workers = range(threads - 1)
        self._tuning = PoolTuning(stopped_us=STOPPED_US if TAKES_TURNS in os.environ else None)
        self._threads: list[ctypes.c_void_p] = []
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self.close)

    @property
    def settings(self) -> dict[str, object]:
        """The pool's settings for a record: name, threads (including the caller), and tuning."""
        return {"name": "labkit", "threads": len(self._workers) + 1, **asdict(self._tuning)}

    @property
    def threads(self) -> tuple[int, ...]:
        """The ``pthread_t`` of each running worker."""
        return tuple(thread.value or 0 for thread in self._threads)

    def uncrowd(self) -> None:
        """Forget that workers were suspended. A process calls this when labkit has stopped it."""
        self._write(self._code.CROWDED, 0)

    def close(self) -> None:
        """Stop the workers when no unit of the current job is left to compute.

        Later kernels run on the caller's thread.
        """
        self._write(self._code.STOP, 1)
        for k, thread in enumerate(self._threads):
            lock = self._worker_address(k, self._code.OWN_LOCK)
            self._libc.pthread_mutex_lock(lock)
            self._libc.pthread_mutex_unlock(lock)
            self._libc.pthread_cond_signal(self._worker_address(k, self._code.WAKE_UP))
            self._libc.pthread_join(thread, None)
        self._threads = []
        self._write(self._code.WORKERS, 0)

    def _start(self) -> None:
        """Zero the pool's memory and start the workers.

        Also called in the child after a fork, because threads do not survive one.
        """
        code, libc = self._code, self._libc
        ctypes.memset(self._memory, 0, 8 * self._first_word(len(self._workers)))
        for name, value in asdict(self._tuning).items():
            self._write(getattr(code, name.upper()), NEVER_US if value is None else value)
        firsts = [self._first_word(k) for k in self._workers]
        locks = [code.LOCK, *(first + code.OWN_LOCK for first in firsts)]
        signals = [code.DONE, *(first + code.WAKE_UP for first in firsts)]
        for lock, signal in zip(locks, signals, strict=True):
            _check(libc.pthread_mutex_init(self._address(lock), None))
            _check(libc.pthread_cond_init(self._address(signal), None))
        self._threads = []
        run = ctypes.c_void_p(code.worker.address)
        try:
            for k in self._workers:
                thread = ctypes.c_void_p()
                _check(libc.pthread_create(ctypes.byref(thread), None, run, ctypes.c_void_p(k + 1)))
                self._threads.append(thread)
        except OSError:
            self.close()
            raise
        self._write(code.WORKERS, len(self._threads))

    def _address(self, word: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory + 8 * word)

    def _worker_address(self, k: int, word: int) -> ctypes.c_void_p:
        return self._address(self._first_word(k) + word)

    def _first_word(self, k: int) -> int:
        """Return the index of worker k's first word. Here, workers are numbered from 0."""
        return int(self._code.FIRST_WORKER + k * self._code.WORKER_WORDS)

    def _write(self, word: int, value: int) -> None:
        ctypes.c_int64.from_address(self._memory + 8 * word).value = value


@cache
def _reserve() -> int:
    """Allocate zeroed memory for the pool, once, and return its address.

    Compiled code that is linked to the memory keeps its address, so that a pool which could not
    start leaves it to the next one. The memory is never freed, because a thread may outlive the
    Python interpreter.
    """
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    memory: int | None = libc.calloc(POOL_BYTES, 1)
    if memory is None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return memory


def _link(memory: int) -> ModuleType:
    """Compile the pool's code (or load it from the cache) and link it as the threading layer."""
    llvm.add_symbol("labkit_pool", memory)
    from labkit.cpu.runtime import compiled_thread_pool

    llvm.add_symbol("numba_parallel_for", compiled_thread_pool.parallel_for.address)
    llvm.add_symbol("get_thread_id", compiled_thread_pool.thread_id.address)
    llvm.add_symbol("get_sched_size", compiled_thread_pool.num_units.address)
    for name in ("do_scheduling_signed", "do_scheduling_unsigned"):
        llvm.add_symbol(name, compiled_thread_pool.divide_range.address)
    return compiled_thread_pool


def _check(status: int) -> None:
    if status != 0:
        raise OSError(status, os.strerror(status))
