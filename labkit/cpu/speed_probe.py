"""The speed probe: measures the current speed of the machine, independently of the arm.

Two fixed numba kernels, a matrix product and a read of memory, are timed in every run before any
code of the arm is loaded, and again after the measurement. Code, sizes and threads are the same in
every arm, so a difference between probes is caused by the machine and not by the arm.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime import thread_pool

MATMUL_SIZE = 256  # rows and columns of the float32 matrices: 33.6 MFLOP
STREAM_BYTES = 32 << 20
REPEATS = 7


@thread_pool.kernel(fastmath=True)
def _matmul(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """Compute ``out = a @ b.T`` with 4x4 tiles (float32; all sizes are multiples of 4)."""
    for tile in numba.prange(a.shape[0] // 4):
        i = 4 * tile
        for j in range(0, b.shape[0], 4):
            for di in range(4):
                s0 = s1 = s2 = s3 = np.float32(0)
                for k in range(a.shape[1]):
                    x = a[i + di, k]
                    s0 += x * b[j, k]
                    s1 += x * b[j + 1, k]
                    s2 += x * b[j + 2, k]
                    s3 += x * b[j + 3, k]
                out[i + di, j] = s0
                out[i + di, j + 1] = s1
                out[i + di, j + 2] = s2
                out[i + di, j + 3] = s3


@thread_pool.kernel(fastmath=True)
def _read(stream: NDArray[Any], parts: NDArray[Any]) -> None:
    """Write the sums of ``len(parts)`` equal chunks of ``stream`` to ``parts``."""
    chunk = len(stream) // len(parts)
    for part in numba.prange(len(parts)):
        total = np.float32(0)
        for i in range(part * chunk, (part + 1) * chunk):
            total += stream[i]
        parts[part] = total


class SpeedProbe:
    """The probe's kernels and their memory: created once per process, used for all its probes.

    ``threads`` is the number of numba threads of the kernels, the same in every arm.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.stream = np.ones(STREAM_BYTES // 4, dtype=np.float32)
        grid = np.arange(MATMUL_SIZE**2, dtype=np.float32).reshape(MATMUL_SIZE, MATMUL_SIZE) % 7
        self.inputs = grid, np.ascontiguousarray(grid.T), np.empty_like(grid)

    def load(self) -> None:
        """Load or compile both kernels, so that the first call of ``time`` does not have to."""
        a, b, out = self.inputs
        _matmul(a, b, out)
        _read(self.stream, np.empty(64, dtype=np.float32))

    def pulse(self) -> None:
        """Run the matrix product once on all threads: about half a millisecond of fixed work."""
        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        _matmul(*self.inputs)
        numba.set_num_threads(before)

    def flush(self) -> None:
        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        _read(self.large, np.empty(64, dtype=np.float32))
        numba.set_num_threads(before)

    @cached_property
    def large(self) -> NDArray[Any]:
        """An array twice as large as all last-level caches, but at least 64 MiB and at most 2 GiB.

        Each thread reads a part of it, so each cache receives twice its own size.
        """
        size = min(max(2 * _last_level_caches(), 64 << 20), 2 << 30)
        return np.ones(size // 4, dtype=np.float32)

    def time(self) -> dict[str, float]:
        """Time both kernels: ``matmul_us`` and ``bandwidth_us``, the medians of ``REPEATS`` runs.

        Raises ``RuntimeError`` if a kernel computed a wrong result.
        """
        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        try:
            a, b, out = self.inputs
            parts = np.empty(64, dtype=np.float32)
            result = {
                "matmul_us": _median_us(_matmul, a, b, out),
                "bandwidth_us": _median_us(_read, self.stream, parts),
            }
        finally:
            numba.set_num_threads(before)
        if out[1, 2] != np.dot(a[1], b[2]) or parts.sum() != len(self.stream):
            raise RuntimeError("a kernel of the speed probe computed a wrong result")
        return result


def _last_level_caches() -> int:
    """Return the bytes of all last-level caches, or 0 if the system does not report them.

    There is one for each socket, and in some CPUs one for each few cores.
    """
    sizes = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        with suppress(OSError, ValueError):
            key = int((cache / "level").read_text()), (cache / "shared_cpu_list").read_text()
            sizes[key] = int((cache / "size").read_text().strip().rstrip("K")) << 10
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _median_us(kernel: Any, *arguments: Any) -> float:
    kernel(*arguments)  # the first run wakes the threads
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        kernel(*arguments)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3
