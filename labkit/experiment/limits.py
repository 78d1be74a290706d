"""What this machine can do at best: the limits that a roofline divides by.

Measured in every run of a kernel workload on the CPU, after everything that counts: reads
of memory larger than the cache, and a float32 matrix product by NumPy's BLAS, each on all
of the arm's threads at once. The best of a few repeats, for a limit is what was reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

STREAM_BYTES = 128 << 20
SIZE = 768  # rows and columns of each thread's product: 0.9 GFLOP
REPEATS = 4


def measure(threads: int) -> dict[str, float]:
    """Measure with so many threads.

    BLAS has one thread in a numba arm's worker, so each thread here is one of its own
    that calls it; NumPy lets go of the interpreter's lock meanwhile.

    Returns
    -------
    dict
        ``read_gb_s`` (1e9 bytes), ``sgemm_gflop_s``, and how they were measured:
        ``threads``, ``read_bytes``, ``sgemm_size``.
    """
    stream = np.ones((threads, STREAM_BYTES // 4 // threads), np.float32)
    a = np.ones((threads, SIZE, SIZE), np.float32)
    out = np.empty_like(a)
    with ThreadPoolExecutor(threads) as pool:
        read_s = _best_s(pool, threads, lambda i: float(stream[i] @ stream[i]))
        sgemm_s = _best_s(pool, threads, lambda i: np.matmul(a[i], a[i], out=out[i]))
    return {
        "read_gb_s": round(stream.nbytes / read_s / 1e9, 3),
        "sgemm_gflop_s": round(threads * 2 * SIZE**3 / sgemm_s / 1e9, 3),
        "threads": threads,
        "read_bytes": stream.nbytes,
        "sgemm_size": SIZE,
    }


def _best_s(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], object]) -> float:
    """Give the shortest time in which all threads did their part."""
    times = []
    for _ in range(1 + REPEATS):  # the first wakes the threads and touches the memory
        start = time.perf_counter()
        list(pool.map(work, range(threads)))
        times.append(time.perf_counter() - start)
    return min(times[1:])
