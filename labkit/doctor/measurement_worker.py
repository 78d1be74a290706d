"""The measuring process: ``python -m labkit.doctor.measurement_worker SECONDS``.

Writes JSON lines to standard output: ``{"step": TEXT}`` as it goes on, then
``{"result": {...}}``. Noise comes first, before a BLAS with threads of its own is loaded.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

WINDOWS = 16  # the noise is the variation between their medians
SIDE = 768  # rows and columns of the product: 0.9 GFLOP
STREAM_BYTES = 256 << 20
SPENT_S = 0.6  # on the product, and on reading memory


def noise(seconds: float) -> dict[str, Any]:
    """Time the arm-blind kernels for ``seconds``: the variation between equal windows.

    Returns ``matmul_cv_pct``, ``bandwidth_cv_pct`` (standard deviation of the windows'
    medians over their mean) and ``windows``.
    """
    from labkit.cpu.speed_probe import Probe
    from labkit.machine.worker_environment import core_count

    probe = Probe(core_count())
    probe.time()
    found: dict[str, list[float]] = {"matmul": [], "bandwidth": []}
    start = time.monotonic()
    for window in range(1, WINDOWS + 1):
        times: list[dict[str, float]] = []
        while not times or time.monotonic() < start + window * seconds / WINDOWS:
            times.append(probe.time())
        for name, medians in found.items():
            medians.append(statistics.median(one[f"{name}_us"] for one in times))
    variation = {
        f"{name}_cv_pct": 100 * statistics.stdev(medians) / statistics.fmean(medians)
        for name, medians in found.items()
    }
    return {**variation, "windows": WINDOWS, "seconds": time.monotonic() - start}


def cpu_bandwidth() -> dict[str, Any]:
    """Read memory with all cores: GB/s."""
    import numpy as np

    from labkit.cpu.roofline_peaks import read_rate
    from labkit.machine.memory_profile import this_machine
    from labkit.machine.worker_environment import core_count

    size = min(STREAM_BYTES, this_machine().available // 8) // 4096 * 4096
    stream = np.ones(size // 4, dtype=np.float32)
    return {"gb_s": read_rate(stream, core_count()), "mib": size >> 20}


def mlx() -> dict[str, Any]:
    """Load the BLAS and MLX as a worker does; measure its product, and the GPU's memory."""
    from labkit.machine import openblas_for_mlx
    from labkit.machine.worker_environment import core_count

    try:
        library, reason = openblas_for_mlx.activate("openblas", core_count()), None
    except openblas_for_mlx.BlasUnavailable as error:
        library, reason = openblas_for_mlx.activate("stock", core_count()), str(error)
    import mlx.core as mx

    from labkit.experiment import known_answer_test

    metal = bool(mx.metal.is_available())
    a, b = mx.random.normal((SIDE, SIDE)), mx.random.normal((SIDE, SIDE))
    mx.eval(a, b)
    seconds = _median_s(lambda: mx.eval(a @ b))
    found = {
        "version": version("mlx"),
        "metal": metal,
        "blas": library,
        "blas_reason": reason,
        "gflop_s": 2 * SIDE**3 / seconds / 1e9,
        "side": SIDE,
    }
    if metal:
        stream = mx.ones(STREAM_BYTES // 4)
        mx.eval(stream)
        found["gpu_gb_s"] = STREAM_BYTES / _median_s(lambda: mx.eval(mx.sum(stream))) / 1e9
    known_answer_test.check()
    return found


def _median_s(run: Callable[[], object]) -> float:
    """Return the median time (seconds) of as many runs as fit, after one to warm up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + SPENT_S
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: Sequence[str]) -> int:
    """Measure everything, and say each step as it begins."""
    seconds = float(argv[0])
    _say(step="loading the reference kernels")
    import labkit.cpu.speed_probe  # noqa: F401

    _say(step=f"noise: the same work for {seconds:g} s")
    result: dict[str, Any] = {"noise": noise(seconds)}
    _say(step="memory bandwidth")
    result["bandwidth"] = cpu_bandwidth()
    _say(step="MLX's matrix product")
    result["mlx"] = mlx()
    _say(result=result)
    return 0


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
