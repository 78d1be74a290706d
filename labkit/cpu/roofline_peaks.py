"""The peak rates of this machine, by which roofline results are divided.

In a kernel workload on the CPU, the processes of the first blocks measure the peaks, each at its
end. A numba kernel reads memory larger than the cache, and NumPy's BLAS multiplies float32
matrices, both on all of the arm's threads. The best of a few repeats is the peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.numba_pipelines import InnerCompiler

STREAM_BYTES = 128 << 20
MATMUL_SIZE = 768  # rows and columns of each thread's matrices: 0.9 GFLOP
REPEATS = 4


def measure_peaks(threads: int) -> dict[str, float]:
    """Measure the peak rates of memory reads and matrix products with ``threads`` threads.

    The process of a numba arm limits BLAS to one thread, so the matrix product is measured with
    ``threads`` Python threads that each call BLAS. NumPy releases the interpreter lock meanwhile.

    Returns ``read_gb_s`` (1e9 bytes/s), ``sgemm_gflop_s``, and the settings of the measurement:
    ``threads``, ``read_bytes``, ``sgemm_size``.
    """
    stream = np.ones(STREAM_BYTES // 4, np.float32)
    read_gb_s = read_gb_per_s(stream, threads)
    a = np.ones((threads, MATMUL_SIZE, MATMUL_SIZE), np.float32)
    out, a_rows = np.empty_like(a), range(threads)
    with ThreadPoolExecutor(threads) as pool:
        sgemm_s = _best_s(lambda: list(pool.map(lambda i: np.matmul(a[i], a[i], out[i]), a_rows)))
    return {
        "read_gb_s": round(read_gb_s, 3),
        "sgemm_gflop_s": round(threads * 2 * MATMUL_SIZE**3 / sgemm_s / 1e9, 3),
        "threads": threads,
        "read_bytes": stream.nbytes,
        "sgemm_size": MATMUL_SIZE,
    }


def read_gb_per_s(stream: NDArray[np.float32], threads: int) -> float:
    """Return the rate (GB/s) at which ``threads`` numba threads read all of ``stream``."""
    return stream.nbytes / _best_s(lambda: read_memory(stream, 8 * threads)) / 1e9


def _best_s(work: Callable[[], object]) -> float:
    """Return the shortest time of ``REPEATS`` runs of ``work``, after a warm-up run (s)."""
    times = []
    for _ in range(1 + REPEATS):  # the first run wakes the threads and touches the memory
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@numba.njit(fastmath=True, pipeline_class=InnerCompiler)  # type: ignore[untyped-decorator]
def _total(part: NDArray[np.float32]) -> np.float32:
    """Return the sum of an array. One core reads it faster in four streams than in one."""
    quarter = len(part) // 4
    a = b = c = d = np.float32(0)
    for i in range(quarter):
        a += part[i]
        b += part[quarter + i]
        c += part[2 * quarter + i]
        d += part[3 * quarter + i]
    return a + b + c + d


@thread_pool.kernel()
def _read_parts(stream: NDArray[np.float32], totals: NDArray[np.float64]) -> None:
    """Write the sums of ``len(totals)`` equal parts of ``stream`` to ``totals``."""
    length = len(stream) // len(totals)
    for part in numba.prange(len(totals)):
        totals[part] = _total(stream[part * length : (part + 1) * length])


def read_memory(stream: NDArray[np.float32], parts: int) -> float:
    """Read ``stream`` in ``parts`` parts of equal size and return the sum of its elements.

    If the length is not a multiple of ``parts``, the remainder is not read.
    """
    totals = np.zeros(parts)
    _read_parts(stream, totals)
    return float(totals.sum())
