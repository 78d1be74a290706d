"""The measuring process: ``python -m labkit.doctor.measurement_worker NOISE_SECONDS``.

It writes JSON lines to standard output: ``{"step": TEXT}`` as each step begins, then
``{"result": {...}}``. Noise is measured first, before a BLAS library starts threads.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

NOISE_WINDOWS = 16  # the noise is the variation between the windows' medians
MATMUL_SIZE = 768  # rows and columns: 0.9 GFLOP
STREAM_BYTES = 256 << 20
TIMING_S = 0.6  # for the matrix product, and again for reading the GPU's memory


def noise(seconds: float) -> dict[str, Any]:
    """Repeat the machine probe's kernels for ``seconds`` and return the variation of their times.

    The time is split into ``NOISE_WINDOWS`` equal windows. ``matmul_cv_pct`` and
    ``bandwidth_cv_pct`` are coefficients of variation: the standard deviation of the windows'
    medians divided by their mean.
    """
    from labkit.cpu.speed_probe import SpeedProbe
    from labkit.machine.worker_environment import core_count

    probe = SpeedProbe(core_count())
    probe.time()
    window_medians: dict[str, list[float]] = {"matmul": [], "bandwidth": []}
    start = time.monotonic()
    for window in range(1, NOISE_WINDOWS + 1):
        samples: list[dict[str, float]] = []
        while not samples or time.monotonic() < start + window * seconds / NOISE_WINDOWS:
            samples.append(probe.time())
        for name, medians in window_medians.items():
            medians.append(statistics.median(sample[f"{name}_us"] for sample in samples))
    variation = {
        f"{name}_cv_pct": 100 * statistics.stdev(medians) / statistics.fmean(medians)
        for name, medians in window_medians.items()
    }
    return {**variation, "windows": NOISE_WINDOWS, "seconds": time.monotonic() - start}


def cpu_rates() -> dict[str, Any]:
    """Measure reads of memory and the probe's matrix product with 1, 2, 4, ... threads, and all.

    ``bandwidth`` has the rate with all cores (GB/s) and the bytes read (MiB); ``scaling`` has for
    each number of threads the rate and the time of the product (us).
    """
    import numba
    import numpy as np

    from labkit.cpu import roofline_peaks, speed_probe
    from labkit.machine.facts.memory_capacity import this_machine
    from labkit.machine.worker_environment import core_count

    size = min(STREAM_BYTES, this_machine().available // 8) // 4096 * 4096
    stream = np.ones(size // 4, dtype=np.float32)
    scaling: list[dict[str, Any]] = []
    cores = core_count()
    for threads in sorted({*(1 << i for i in range(cores.bit_length())), cores}):
        numba.set_num_threads(threads)
        gb_s = roofline_peaks.read_gb_per_s(stream, threads)
        matmul_us = speed_probe.SpeedProbe(threads).time()["matmul_us"]
        scaling.append({"threads": threads, "gb_s": gb_s, "matmul_us": matmul_us})
    return {"bandwidth": {"gb_s": gb_s, "mib": size >> 20}, "scaling": scaling}


def mlx() -> dict[str, Any]:
    """Load BLAS and MLX as a worker does and time a matrix product.

    On a GPU, the bandwidth of reading the GPU's memory is measured too.
    """
    from labkit.machine import openblas_for_mlx
    from labkit.machine.worker_environment import core_count

    try:
        library, reason = openblas_for_mlx.activate("openblas", core_count()), None
    except openblas_for_mlx.BlasUnavailable as error:
        library, reason = openblas_for_mlx.activate("stock", core_count()), str(error)
    import mlx.core as mx

    from labkit.experiment.worker import mlx_known_answer_test
    from labkit.metal.gpu_properties import gpu_properties
    from labkit.metal.kernel_call import executor_for

    metal, cuda = bool(mx.metal.is_available()), bool(mx.cuda.is_available())
    a, b = (mx.random.normal((MATMUL_SIZE, MATMUL_SIZE)) for _ in range(2))
    mx.eval(a, b)
    seconds = _median_s(lambda: mx.eval(a @ b))
    result = {
        "version": version("mlx"),
        "metal": metal,
        "cuda": cuda,
        "blas": library,
        "blas_reason": reason,
        "gflop_s": 2 * MATMUL_SIZE**3 / seconds / 1e9,
        "side": MATMUL_SIZE,
    }
    if metal or cuda:
        device = "metal" if metal else "cuda"
        result["gpu"] = gpu_properties(device, executor_for(device)).text
        stream = mx.ones(STREAM_BYTES // 4)
        mx.eval(stream)
        result["gpu_gb_s"] = STREAM_BYTES / _median_s(lambda: mx.eval(mx.sum(stream))) / 1e9
    mlx_known_answer_test.check()
    return result


def _median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of ``run`` over ``TIMING_S`` seconds, after one warm-up call."""
    run()
    times: list[float] = []
    end = time.perf_counter() + TIMING_S
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: Sequence[str]) -> None:
    """Measure everything and report each step as it begins."""
    seconds = float(argv[0])
    _write(step="loading the probe's kernels")
    import labkit.cpu.speed_probe  # noqa: F401

    _write(step=f"noise: repeating the same work for {seconds:g} s")
    result: dict[str, Any] = {"noise": noise(seconds)}
    _write(step="memory bandwidth, and the speed by threads")
    result |= cpu_rates()
    _write(step="MLX's matrix product")
    result["mlx"] = mlx() if find_spec("mlx") else None
    _write(result=result)


def _write(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
