"""The code of the thread pool, compiled by numba. It runs without the Python interpreter.

A job consists of units. The caller publishes the job and opens the gate. Threads take units by
incrementing a ticket counter, and a thread that finds no ticket left closes the gate. A worker is
inside from entering the open gate until leaving it, and the caller waits only for workers that are
inside. So a thread that the operating system has suspended delays only a unit that it has begun.

The gate is one word, which contains the number of workers inside, whether the gate is open, and the
number of threads of the job. So a worker enters with a single compare-and-swap, which fails if the
gate has been closed.

A worker without a job spins, then sleeps. If its clock jumps while it spins, the system gave its
core to another process. For a while all workers then spin only briefly, because spinning would use
up the time slice that the next job needs. After a longer jump they do not in a live arm's process,
which was stopped during another arm's turn.

The pool's memory is the symbol ``labkit_pool``. Offsets are in 8-byte words.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from labkit.cpu.runtime.address_intrinsics import fetch_add, load_atomic, stack_words
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.runtime.jit import emitted
from labkit.cpu.runtime.numba_pipelines import CallerCompiler, InnerCompiler

POOL_SYMBOL = "labkit_pool"
# Cores fetch pairs of cache lines, so words that different threads write are in different pairs.
LINE_PAIR_WORDS = 2 * CACHE_LINE_BYTES // 8

GATE, TICKET, BUSY, JOB, WAITING, CROWDED, CONTROL, LOCK, DONE = (
    i * LINE_PAIR_WORDS for i in range(9)
)
FUNCTION, ARGUMENTS, DIMENSIONS, STEPS, DATA, RANK, COUNT, UNITS = (JOB + i for i in range(8))
WORKERS, STOP = CONTROL, CONTROL + 1
# The fields of ``labkit.cpu.runtime.thread_pool.PoolTuning``.
GRAIN, SPIN_US, ASIDE_US, STOPPED_US, CROWDED_US, CROWDED_SPIN_US = (
    CONTROL + 2 + i for i in range(6)
)
# The words of one worker: whether it sleeps, its pthread_t, and the mutex and the condition
# variable that wake it.
FIRST_WORKER = 9 * LINE_PAIR_WORDS
ASLEEP, IDENTITY, OWN_LOCK, WAKE_UP = 0, 1, LINE_PAIR_WORDS, 2 * LINE_PAIR_WORDS
WORKER_WORDS = 3 * LINE_PAIR_WORDS

# The bits of the gate: the number of workers inside (bits 0 to 15), whether the gate is open (bit
# 16), and the number of threads of the job (from bit 32 on).
INSIDE = (1 << 16) - 1
OPEN = 1 << 16
THREADS_SHIFT = 32

CLOCK = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)
SPINS_PER_CLOCK_READ = 32  # reads of the gate between two reads of the clock

# LLVM's intrinsics that hint to the core that it is in a spin loop, and their arguments.
_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "arm64": ("llvm.aarch64.isb", (15,)),
    "aarch64": ("llvm.aarch64.isb", (15,)),
}
_I64 = ir.IntType(64)
_POINTER = _I64.as_pointer()
_ORDER = "seq_cst"

_mutex_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_cond_signal = types.ExternalFunction("pthread_cond_signal", types.int32(types.intp))
_cond_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_pthread_self = types.ExternalFunction("pthread_self", types.intp())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_chunk_size = types.ExternalFunction("get_parallel_chunksize", types.intp())


def _pool_memory(builder: Any) -> Any:
    symbol = builder.module.globals.get(POOL_SYMBOL)
    if symbol is None:
        symbol = ir.GlobalVariable(builder.module, _I64, POOL_SYMBOL)
    return builder.ptrtoint(symbol, _I64)


# Intrinsics, because numba would compile a function once for each constant.
@emitted(types.intp)
def _address(builder: Any, word: Any) -> Any:
    """Return the address of a word of the pool's memory."""
    return builder.add(_pool_memory(builder), builder.mul(word, _I64(8)))


@emitted(types.intp)
def _worker_address(builder: Any, k: Any, word: Any) -> Any:
    """Return the address of a word of worker k. Workers are numbered from 1."""
    first = builder.mul(builder.sub(k, _I64(1)), _I64(8 * WORKER_WORDS))
    offset = builder.add(builder.mul(word, _I64(8)), _I64(8 * FIRST_WORKER))
    return builder.add(_pool_memory(builder), builder.add(first, offset))


@emitted(types.intp)
def _load(builder: Any, address: Any) -> Any:
    """Read a word non-atomically. No other thread may write it at the same time."""
    return builder.load(builder.inttoptr(address, _POINTER))


@emitted()
def _store(builder: Any, address: Any, value: Any) -> None:
    """Write a word non-atomically. No other thread may read it at the same time."""
    builder.store(value, builder.inttoptr(address, _POINTER))


@emitted()
def _store_atomic(builder: Any, address: Any, value: Any) -> None:
    """Write a word atomically, because other threads read it."""
    builder.store_atomic(value, builder.inttoptr(address, _POINTER), _ORDER, 8)


@emitted()
def _fetch_and(builder: Any, address: Any, value: Any) -> None:
    """Replace a word by its bitwise and with ``value``, atomically."""
    builder.atomic_rmw("and", builder.inttoptr(address, _POINTER), value, _ORDER)


@emitted(types.intp)
def _compare_and_swap(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write ``value`` to a word if it equals ``expected``, atomically. Return its old value."""
    pointer = builder.inttoptr(address, _POINTER)
    pair = builder.cmpxchg(pointer, expected, value, _ORDER, _ORDER)
    return builder.extract_value(pair, 0)


@emitted()
def _pause(builder: Any) -> None:
    """Hint to the core that it is in a spin loop."""
    if platform.machine() in _PAUSE:
        name, values = _PAUSE[platform.machine()]
        arguments = [ir.IntType(32)(value) for value in values]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@emitted()
def _call(
    builder: Any, function: Any, arguments: Any, dimensions: Any, steps: Any, data: Any
) -> None:
    """Call the loop body that numba generated, whose address is ``function``."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
    pointer = builder.inttoptr(function, kind.as_pointer())
    builder.call(pointer, [arguments, dimensions, steps, data])


@njit(pipeline_class=InnerCompiler)
def _now_us(buffer):  # type: ignore[no-untyped-def]
    """Return a monotonic time in us. ``buffer`` is the address of two words of scratch memory."""
    _clock_gettime(CLOCK, buffer)
    return _load(buffer) * 1_000_000 + _load(buffer + 8) // 1_000


@njit(pipeline_class=InnerCompiler)
def _spin_limit_us(now, before):  # type: ignore[no-untyped-def]
    """Return how long a worker may spin before it sleeps (us).

    ``before`` and ``now`` are two successive clock reads of a spinning worker. If more than
    ``ASIDE_US`` but at most ``STOPPED_US`` passed between them, mark the pool as crowded for
    ``CROWDED_US``.
    """
    if _load(_address(ASIDE_US)) < now - before <= _load(_address(STOPPED_US)):
        _store_atomic(_address(CROWDED), now + _load(_address(CROWDED_US)))
    return _load(_address(CROWDED_SPIN_US if now < load_atomic(_address(CROWDED)) else SPIN_US))


@njit(pipeline_class=InnerCompiler)
def _has_job(k):  # type: ignore[no-untyped-def]
    gate = load_atomic(_address(GATE))
    return gate & OPEN != 0 and k < gate >> THREADS_SHIFT


@njit(pipeline_class=InnerCompiler)
def _enter(k):  # type: ignore[no-untyped-def]
    """Enter the gate as worker k. Return False if it is closed or the job does not use worker k."""
    gate = load_atomic(_address(GATE))
    while gate & OPEN != 0 and k < gate >> THREADS_SHIFT:
        current = _compare_and_swap(_address(GATE), gate, gate + 1)
        if current == gate:
            return True
        gate = current
    return False


@njit(pipeline_class=InnerCompiler)
def _leave():  # type: ignore[no-untyped-def]
    """Leave the gate. The last worker to leave wakes the caller if the caller sleeps."""
    left = fetch_add(_address(GATE), -1) - 1
    if left & INSIDE == 0 and load_atomic(_address(WAITING)) != 0:
        _mutex_lock(_address(LOCK))
        _mutex_unlock(_address(LOCK))
        _cond_signal(_address(DONE))


@njit(pipeline_class=InnerCompiler)
def _wake_first(k, threads):  # type: ignore[no-untyped-def]
    """Wake the first sleeping worker among k, k + 1, ... below ``threads``."""
    while k < threads:
        if _compare_and_swap(_worker_address(k, ASLEEP), 1, 0) == 1:
            _mutex_lock(_worker_address(k, OWN_LOCK))
            _mutex_unlock(_worker_address(k, OWN_LOCK))
            _cond_signal(_worker_address(k, WAKE_UP))
            return
        k += 1


@njit(pipeline_class=InnerCompiler)
def _run_units():  # type: ignore[no-untyped-def]
    """Take units of the job until none is left, then close the gate."""
    rank, count, units = _load(_address(RANK)), _load(_address(COUNT)), _load(_address(UNITS))
    arguments, steps = _load(_address(ARGUMENTS)), _load(_address(STEPS))
    dimensions = _load(_address(DIMENSIONS))
    own = stack_words(count + rank + 1)
    own_dimensions = own + 8 * count
    _store(own_dimensions, 1)
    for i in range(1, rank + 1):
        _store(own_dimensions + 8 * i, _load(dimensions + 8 * i))
    unit = fetch_add(_address(TICKET), 1)
    while unit < units:
        for i in range(count):
            _store(own + 8 * i, _load(arguments + 8 * i) + unit * _load(steps + 8 * i))
        _call(_load(_address(FUNCTION)), own, own_dimensions, steps, _load(_address(DATA)))
        unit = fetch_add(_address(TICKET), 1)
    _fetch_and(_address(GATE), ~OPEN)


@njit(pipeline_class=InnerCompiler)
def _await_workers():  # type: ignore[no-untyped-def]
    """Wait until no worker is inside the gate: first spin, then sleep.

    Sleeping frees this core for a worker that has been suspended.
    """
    if load_atomic(_address(GATE)) & INSIDE == 0:
        return
    buffer = stack_words(2)
    end = _now_us(buffer) + _load(_address(ASIDE_US))
    while _now_us(buffer) < end:
        for _ in range(SPINS_PER_CLOCK_READ):
            if load_atomic(_address(GATE)) & INSIDE == 0:
                return
            _pause()
    _mutex_lock(_address(LOCK))
    _store_atomic(_address(WAITING), 1)
    while load_atomic(_address(GATE)) & INSIDE != 0:
        _cond_wait(_address(DONE), _address(LOCK))
    _store_atomic(_address(WAITING), 0)
    _mutex_unlock(_address(LOCK))


@njit(pipeline_class=InnerCompiler)
def _await_job(k):  # type: ignore[no-untyped-def]
    """Wait for a job and enter its gate as worker k. Return False if the pool is being closed."""
    buffer = stack_words(2)
    start = before = _now_us(buffer)
    while load_atomic(_address(STOP)) == 0:
        for _ in range(SPINS_PER_CLOCK_READ):
            if _enter(k):
                return True
            _pause()
        now = _now_us(buffer)
        if now - start > _spin_limit_us(now, before):
            _sleep_until_woken(k)
            if _enter(k):
                _wake_first(k + 1, load_atomic(_address(GATE)) >> THREADS_SHIFT)
                return True
            start = now = _now_us(buffer)
        before = now
    return False


@njit(pipeline_class=InnerCompiler)
def _sleep_until_woken(k):  # type: ignore[no-untyped-def]
    """Sleep as worker k until woken. Return at once if there is a job or the pool is closing."""
    _mutex_lock(_worker_address(k, OWN_LOCK))
    _store_atomic(_worker_address(k, ASLEEP), 1)
    if not _has_job(k) and load_atomic(_address(STOP)) == 0:
        _cond_wait(_worker_address(k, WAKE_UP), _worker_address(k, OWN_LOCK))
    _store_atomic(_worker_address(k, ASLEEP), 0)
    _mutex_unlock(_worker_address(k, OWN_LOCK))


@cfunc("intp(intp)", cache=True, pipeline_class=CallerCompiler)
def worker(k):  # type: ignore[no-untyped-def]
    """Run worker k (numbered from 1) until the pool closes. Started by ``pthread_create``."""
    _store_atomic(_worker_address(k, IDENTITY), _pthread_self())
    while _await_job(k):
        _run_units()
        _leave()
    return 0


@cfunc(
    "void(intp, intp, intp, intp, intp, intp, intp, intp)",
    cache=True,
    pipeline_class=CallerCompiler,
)
def parallel_for(function, arguments, dimensions, steps, data, rank, count, threads):  # type: ignore[no-untyped-def]
    """Run numba's loop ``function`` over ``dimensions[0]`` units, on up to ``threads`` threads.

    ``arguments``, ``dimensions`` and ``steps`` are addresses of arrays of words. ``arguments[i]``
    advances by ``steps[i]`` bytes from one unit to the next. ``rank`` is the number of inner
    dimensions, ``count`` the number of arguments. If another thread is using the pool, the caller
    runs all units itself.
    """
    units = _load(dimensions)
    threads = min(threads, load_atomic(_address(WORKERS)) + 1, units)
    if threads < 2 or _compare_and_swap(_address(BUSY), 0, 1) != 0:
        _call(function, arguments, dimensions, steps, data)
        return
    _store(_address(FUNCTION), function)
    _store(_address(ARGUMENTS), arguments)
    _store(_address(DIMENSIONS), dimensions)
    _store(_address(STEPS), steps)
    _store(_address(DATA), data)
    _store(_address(RANK), rank)
    _store(_address(COUNT), count)
    _store(_address(UNITS), units)
    _store_atomic(_address(TICKET), 0)
    _store_atomic(_address(GATE), threads << THREADS_SHIFT | OPEN)
    _wake_first(1, threads)
    _run_units()
    _await_workers()
    _store_atomic(_address(BUSY), 0)


@cfunc("intp()", cache=True, pipeline_class=CallerCompiler)
def thread_id():  # type: ignore[no-untyped-def]
    """Return the number of the calling worker (from 1), or 0 for a thread that is not a worker."""
    identity = _pthread_self()
    for k in range(1, load_atomic(_address(WORKERS)) + 1):
        if load_atomic(_worker_address(k, IDENTITY)) == identity:
            return k
    return 0


@njit(pipeline_class=InnerCompiler)
def _extent(starts, ends, axis):  # type: ignore[no-untyped-def]
    return max(0, _load(ends + 8 * axis) - _load(starts + 8 * axis) + 1)


@njit(pipeline_class=InnerCompiler)
def _longest_axis(axes, starts, ends):  # type: ignore[no-untyped-def]
    """Return the axis with the most indices. A range is divided along this axis."""
    longest = 0
    for axis in range(1, axes):
        if _extent(starts, ends, axis) > _extent(starts, ends, longest):
            longest = axis
    return longest


@cfunc("intp(intp, intp, intp, intp)", cache=True, pipeline_class=CallerCompiler)
def num_units(threads, axes, starts, ends):  # type: ignore[no-untyped-def]
    """Return the number of units into which a range of indices is divided.

    ``starts`` and ``ends`` are addresses of ``axes`` words each. If a chunk size was set with
    ``numba.set_parallel_chunksize``, it determines the number; otherwise ``GRAIN`` does.
    """
    extent = _extent(starts, ends, _longest_axis(axes, starts, ends))
    chunk = _chunk_size()
    units = extent // chunk if chunk > 0 else threads * _load(_address(GRAIN))
    return max(1, min(extent, units))


@cfunc("intp(intp, intp, intp, intp, intp, intp)", cache=True, pipeline_class=CallerCompiler)
def divide_range(axes, starts, ends, count, schedule, _debug):  # type: ignore[no-untyped-def]
    """Divide a range into ``count`` units and write them to ``schedule``.

    For each unit, ``schedule`` gets the starts of all axes, then their (inclusive) ends.
    """
    longest = _longest_axis(axes, starts, ends)
    extent, start = _extent(starts, ends, longest), _load(starts + 8 * longest)
    for unit in range(count):
        entry = schedule + 16 * axes * unit
        for axis in range(axes):
            _store(entry + 8 * axis, _load(starts + 8 * axis))
            _store(entry + 8 * (axes + axis), _load(ends + 8 * axis))
        _store(entry + 8 * longest, start + extent * unit // count)
        _store(entry + 8 * (axes + longest), start + extent * (unit + 1) // count - 1)
    return schedule
