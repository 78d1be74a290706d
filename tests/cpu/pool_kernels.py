"""Kernels for the tests of the thread pool; importing this module installs the pool."""

import numba
import numpy as np

from labkit.cpu.runtime import thread_pool
from labkit.machine.worker_environment import numba_without_scipy

with numba_without_scipy():
    pool = thread_pool.install()

from labkit.cpu.runtime import compiled_thread_pool as code


@numba.njit(parallel=True, nogil=True, cache=True)
def add_one(x):
    for i in numba.prange(len(x)):
        x[i] += 1


@numba.njit(parallel=True, nogil=True, cache=True)
def who(seen):
    """Write the thread id of every unit; each unit computes for a while."""
    for i in numba.prange(len(seen)):
        total = 0.0
        for j in range(5000):
            total += np.sin(total + j)
        seen[i] = numba.get_thread_id() if total < 1e9 else -1


@numba.njit(parallel=True, nogil=True, cache=True)
def meet(arrived, met):
    """Run two units that wait for each other, within a limit."""
    for i in numba.prange(2):
        code.fetch_add(arrived, 1)
        num_loads = 0
        while code.load_atomic(arrived) < 2 and num_loads < 300_000_000:
            num_loads += 1
        met[i] = code.load_atomic(arrived) >= 2 and num_loads < 300_000_000


@numba.njit(cache=True)
def spin_limit(now, before):
    return code._spin_limit_us(now, before)


@numba.njit(parallel=True, cache=True)
def total(x):
    s = 0
    for i in numba.prange(len(x)):
        s += x[i]
    return s


@numba.njit(parallel=True, cache=True)
def several(x):
    return np.sqrt(x) * 3 + x


@numba.njit(parallel=True, cache=True)
def unsigned(out):
    for i in numba.prange(np.uint64(len(out))):
        out[i] = i


@numba.njit(parallel=True, cache=True)
def fails(x):
    if x[0] > 1:
        raise ValueError("larger than one")
    for i in numba.prange(len(x)):
        x[i] += 1


def meeting():
    arrived, met = np.zeros(1, np.int64), np.zeros(2, np.bool_)
    meet(arrived.ctypes.data, met)
    return bool(met.all())
