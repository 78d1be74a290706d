"""What the threads of the pool run: machine code without the interpreter, by numba.

A job is a number of units. The caller publishes it and opens the gate; whoever is there
takes units by ticket; whoever finds no ticket left closes the gate. A worker counts as
present only between entering the open gate and leaving, and the caller waits for those
inside alone. So a thread that the system has put aside holds nothing up that it has not
begun.

The gate is one word, so that entering is one compare-and-swap that fails once it is
closed: how many workers are inside, whether it is open, and for how many threads.

A worker that waits spins, then sleeps. One that finds, by the clock, that it was put aside
while it spun has company on its core: from then on, for a while, no worker spins for long.
The next spin would cost the time slice in which it is to work.

The pool's memory is the symbol ``labkit_pool``, offsets in 8-byte words. Everything is one
file because numba's cache notices changes of the caller's file alone.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

STATE = "labkit_pool"
LINE = 16  # words: no two lines share what one core fetches for another (128 bytes)

GATE, TICKET, BUSY, JOB, WAITING, CROWDED, LIFE, LOCK, DONE = (i * LINE for i in range(9))
FUNCTION, ARGUMENTS, DIMENSIONS, STEPS, DATA, RANK, COUNT, UNITS = (JOB + i for i in range(8))
WORKERS, STOP = LIFE, LIFE + 1
# The rule, which ``labkit.cpu.thread_pool.PoolTuning`` explains.
GRAIN, SPIN_US, ASIDE_US, CROWDED_US, CROWDED_SPIN_US = (LIFE + 2 + i for i in range(5))
# A worker's own lines: is it asleep, who is it, and what wakes it.
FIRST_WORKER = 9 * LINE
ASLEEP, IDENTITY, OWN_LOCK, WAKE_UP = 0, 1, LINE, 2 * LINE
WORKER_WORDS = 3 * LINE

INSIDE = (1 << 16) - 1
OPEN = 1 << 16
THREADS = 32  # the bit from which the gate says how many

CLOCK = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)
LOOKS = 32  # at the gate, between two at the clock

# LLVM's intrinsics that tell a core it waits, and their arguments.
_RELAX = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "arm64": ("llvm.aarch64.isb", (15,)),
    "aarch64": ("llvm.aarch64.isb", (15,)),
}
_I64 = ir.IntType(64)
_POINTER = _I64.as_pointer()
_ORDER = "seq_cst"

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_signal = types.ExternalFunction("pthread_cond_signal", types.int32(types.intp))
_sleep = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_self = types.ExternalFunction("pthread_self", types.intp())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_chunk_size = types.ExternalFunction("get_parallel_chunksize", types.intp())


@intrinsic
def _state(_typing):  # type: ignore[no-untyped-def]
    """Return the address of the pool's memory."""

    def emit(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        symbol = builder.module.globals.get(STATE)
        if symbol is None:
            symbol = ir.GlobalVariable(builder.module, _I64, STATE)
        return builder.ptrtoint(symbol, _I64)

    return types.intp(), emit


@intrinsic
def _load(_typing, address):  # type: ignore[no-untyped-def]
    """Read a word."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _POINTER))

    return types.intp(types.intp), emit


@intrinsic
def _store(_typing, address, value):  # type: ignore[no-untyped-def]
    """Write a word."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@intrinsic
def _look(_typing, address):  # type: ignore[no-untyped-def]
    """Read a word that others write."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _POINTER), _ORDER, 8)

    return types.intp(types.intp), emit


@intrinsic
def _show(_typing, address, value):  # type: ignore[no-untyped-def]
    """Write a word that others read."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, value = arguments
        builder.store_atomic(value, builder.inttoptr(address, _POINTER), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@intrinsic
def _add(_typing, address, value):  # type: ignore[no-untyped-def]
    """Add to a word in one step; return what it was."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, value = arguments
        return builder.atomic_rmw("add", builder.inttoptr(address, _POINTER), value, _ORDER)

    return types.intp(types.intp, types.intp), emit


@intrinsic
def _mask(_typing, address, value):  # type: ignore[no-untyped-def]
    """Keep only the bits of ``value`` in one step."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, value = arguments
        builder.atomic_rmw("and", builder.inttoptr(address, _POINTER), value, _ORDER)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@intrinsic
def _swap(_typing, address, expected, value):  # type: ignore[no-untyped-def]
    """Write ``value`` if the word is as expected, in one step; return what it was."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, expected, value = arguments
        pointer = builder.inttoptr(address, _POINTER)
        pair = builder.cmpxchg(pointer, expected, value, _ORDER, _ORDER)
        return builder.extract_value(pair, 0)

    return types.intp(types.intp, types.intp, types.intp), emit


@intrinsic
def _relax(_typing):  # type: ignore[no-untyped-def]
    """Tell the core that this is a loop that waits."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in _RELAX:
            name, values = _RELAX[platform.machine()]
            arguments = [ir.IntType(32)(value) for value in values]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _words(_typing, count):  # type: ignore[no-untyped-def]
    """Return the address of so many words, until the function returns."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(builder.alloca(_I64, arguments[0]), _I64)

    return types.intp(types.intp), emit


@intrinsic
def _call(_typing, function, arguments, dimensions, steps, data):  # type: ignore[no-untyped-def]
    """Call numba's loop at address ``function``."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        function, *rest = values
        builder.call(builder.inttoptr(function, kind.as_pointer()), rest)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), emit


@njit
def _at(word):  # type: ignore[no-untyped-def]
    """Return the address of a word of the pool's memory."""
    return _state() + 8 * word


@njit
def _worker(k, word):  # type: ignore[no-untyped-def]
    """Return the address of a word of worker k, from 1."""
    return _at(FIRST_WORKER + (k - 1) * WORKER_WORDS + word)


@njit
def _now(buffer):  # type: ignore[no-untyped-def]
    """Return microseconds of a clock that nobody sets; ``buffer`` holds two words."""
    _clock_gettime(CLOCK, buffer)
    return _load(buffer) * 1_000_000 + _load(buffer + 8) // 1_000


@njit
def _patience(now, before):  # type: ignore[no-untyped-def]
    """Return for how long a worker spins: less while workers are put aside, as since ``before``."""
    if now - before > _load(_at(ASIDE_US)):
        _show(_at(CROWDED), now + _load(_at(CROWDED_US)))
    return _load(_at(CROWDED_SPIN_US if now < _look(_at(CROWDED)) else SPIN_US))


@njit
def _wanted(k):  # type: ignore[no-untyped-def]
    """Tell whether there is a job for worker k."""
    gate = _look(_at(GATE))
    return gate & OPEN != 0 and k < gate >> THREADS


@njit
def _enter(k):  # type: ignore[no-untyped-def]
    """Go through the gate; return whether it was open."""
    gate = _look(_at(GATE))
    while gate & OPEN != 0 and k < gate >> THREADS:
        seen = _swap(_at(GATE), gate, gate + 1)
        if seen == gate:
            return True
        gate = seen
    return False


@njit
def _leave():  # type: ignore[no-untyped-def]
    """Go out; the last one wakes a caller that sleeps."""
    left = _add(_at(GATE), -1) - 1
    if left & INSIDE == 0 and _look(_at(WAITING)) != 0:
        _lock(_at(LOCK))
        _unlock(_at(LOCK))
        _signal(_at(DONE))


@njit
def _wake(k, threads):  # type: ignore[no-untyped-def]
    """Wake the first of the workers k, k + 1, ... below ``threads`` that sleeps."""
    while k < threads:
        if _swap(_worker(k, ASLEEP), 1, 0) == 1:
            _lock(_worker(k, OWN_LOCK))
            _unlock(_worker(k, OWN_LOCK))
            _signal(_worker(k, WAKE_UP))
            return
        k += 1


@njit
def _work():  # type: ignore[no-untyped-def]
    """Take units until none is left, then close the gate."""
    rank, count, units = _load(_at(RANK)), _load(_at(COUNT)), _load(_at(UNITS))
    arguments, steps = _load(_at(ARGUMENTS)), _load(_at(STEPS))
    dimensions = _load(_at(DIMENSIONS))
    own = _words(count + rank + 1)
    own_dimensions = own + 8 * count
    _store(own_dimensions, 1)
    for i in range(1, rank + 1):
        _store(own_dimensions + 8 * i, _load(dimensions + 8 * i))
    unit = _add(_at(TICKET), 1)
    while unit < units:
        for i in range(count):
            _store(own + 8 * i, _load(arguments + 8 * i) + unit * _load(steps + 8 * i))
        _call(_load(_at(FUNCTION)), own, own_dimensions, steps, _load(_at(DATA)))
        unit = _add(_at(TICKET), 1)
    _mask(_at(GATE), ~OPEN)


@njit
def _await_workers():  # type: ignore[no-untyped-def]
    """Wait until nobody is inside: spin, then leave the core to who was put aside."""
    if _look(_at(GATE)) & INSIDE == 0:
        return
    buffer = _words(2)
    end = _now(buffer) + _load(_at(ASIDE_US))
    while _now(buffer) < end:
        for _ in range(LOOKS):
            if _look(_at(GATE)) & INSIDE == 0:
                return
            _relax()
    _lock(_at(LOCK))
    _show(_at(WAITING), 1)
    while _look(_at(GATE)) & INSIDE != 0:
        _sleep(_at(DONE), _at(LOCK))
    _show(_at(WAITING), 0)
    _unlock(_at(LOCK))


@njit
def _await_job(k):  # type: ignore[no-untyped-def]
    """Wait until worker k is inside a job; return False if the pool ends instead."""
    buffer = _words(2)
    start = before = _now(buffer)
    while _look(_at(STOP)) == 0:
        for _ in range(LOOKS):
            if _enter(k):
                return True
            _relax()
        now = _now(buffer)
        if now - start > _patience(now, before):
            _nap(k)
            if _enter(k):
                _wake(k + 1, _look(_at(GATE)) >> THREADS)
                return True
            start = now = _now(buffer)
        before = now
    return False


@njit
def _nap(k):  # type: ignore[no-untyped-def]
    """Sleep until woken, unless there is something to do."""
    _lock(_worker(k, OWN_LOCK))
    _show(_worker(k, ASLEEP), 1)
    if not _wanted(k) and _look(_at(STOP)) == 0:
        _sleep(_worker(k, WAKE_UP), _worker(k, OWN_LOCK))
    _show(_worker(k, ASLEEP), 0)
    _unlock(_worker(k, OWN_LOCK))


@cfunc("intp(intp)", cache=True)
def worker(k):  # type: ignore[no-untyped-def]
    """Be worker k, from 1, until the pool ends: what ``pthread_create`` starts."""
    _show(_worker(k, IDENTITY), _self())
    while _await_job(k):
        _work()
        _leave()
    return 0


@cfunc("void(intp, intp, intp, intp, intp, intp, intp, intp)", cache=True)
def parallel_for(function, arguments, dimensions, steps, data, rank, count, threads):  # type: ignore[no-untyped-def]
    """Run numba's loop ``function`` over ``dimensions[0]`` units on so many threads.

    Addresses and counts; ``arguments[i]`` moves by ``steps[i]`` bytes from unit to unit.
    A caller that finds the pool in use by another one runs all units itself.
    """
    units = _load(dimensions)
    threads = min(threads, _look(_at(WORKERS)) + 1, units)
    if threads < 2 or _swap(_at(BUSY), 0, 1) != 0:
        _call(function, arguments, dimensions, steps, data)
        return
    _store(_at(FUNCTION), function)
    _store(_at(ARGUMENTS), arguments)
    _store(_at(DIMENSIONS), dimensions)
    _store(_at(STEPS), steps)
    _store(_at(DATA), data)
    _store(_at(RANK), rank)
    _store(_at(COUNT), count)
    _store(_at(UNITS), units)
    _show(_at(TICKET), 0)
    _show(_at(GATE), threads << THREADS | OPEN)
    _wake(1, threads)
    _work()
    _await_workers()
    _show(_at(BUSY), 0)


@cfunc("intp()", cache=True)
def thread_id():  # type: ignore[no-untyped-def]
    """Return the number of the worker that asks, or 0 for any other thread."""
    identity = _self()
    for k in range(1, _look(_at(WORKERS)) + 1):
        if _look(_worker(k, IDENTITY)) == identity:
            return k
    return 0


@njit
def _extent(starts, ends, axis):  # type: ignore[no-untyped-def]
    """Return how many indices a range has; ends count."""
    return max(0, _load(ends + 8 * axis) - _load(starts + 8 * axis) + 1)


@njit
def _longest(axes, starts, ends):  # type: ignore[no-untyped-def]
    """Return the axis that is cut: the one with the most indices."""
    longest = 0
    for axis in range(1, axes):
        if _extent(starts, ends, axis) > _extent(starts, ends, longest):
            longest = axis
    return longest


@cfunc("intp(intp, intp, intp, intp)", cache=True)
def pieces(threads, axes, starts, ends):  # type: ignore[no-untyped-def]
    """Return into how many units a range of indices is cut.

    ``starts`` and ``ends`` are addresses of ``axes`` words. A caller who asked numba for a
    chunk size gets it.
    """
    extent = _extent(starts, ends, _longest(axes, starts, ends))
    chunk = _chunk_size()
    wanted = extent // chunk if chunk > 0 else threads * _load(_at(GRAIN))
    return max(1, min(extent, wanted))


@cfunc("intp(intp, intp, intp, intp, intp, intp)", cache=True)
def cut(axes, starts, ends, count, schedule, _debug):  # type: ignore[no-untyped-def]
    """Write the units of a range: for each the starts of all axes, then the ends."""
    longest = _longest(axes, starts, ends)
    extent, start = _extent(starts, ends, longest), _load(starts + 8 * longest)
    for unit in range(count):
        at = schedule + 16 * axes * unit
        for axis in range(axes):
            _store(at + 8 * axis, _load(starts + 8 * axis))
            _store(at + 8 * (axes + axis), _load(ends + 8 * axis))
        _store(at + 8 * longest, start + extent * unit // count)
        _store(at + 8 * (axes + longest), start + extent * (unit + 1) // count - 1)
    return schedule
