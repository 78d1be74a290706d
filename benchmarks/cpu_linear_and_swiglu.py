"""CPU operations against their alternatives: linear layers against OpenBLAS, SwiGLU against MLX.

Each side runs in a process of its own, because two spinning thread pools in one process slow each
other down. The processes alternate, and the table shows medians over rounds and their ratio. Run
``python benchmarks/cpu_linear_and_swiglu.py``; ``--rounds N`` sets the number of rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]

# Rows, depth, width: a decode step of 1, 8 or 16 requests, and prefill chunks.
PRODUCTS = [
    (1, 512, 1536),
    (8, 512, 1536),
    (16, 256, 768),
    (16, 256, 4096),
    (16, 512, 1536),
    (16, 1024, 3072),
    (64, 512, 1536),
    (512, 512, 1536),
    (512, 1536, 512),
]
GATES = [(16, 768), (512, 768), (512, 1536)]
SECONDS_PER_CASE = 0.05


def typical_seconds(operation: Callable[[], object]) -> float:
    """Return the median seconds of a call, after a warm-up call."""
    operation()
    times: list[float] = []
    end = time.perf_counter() + SECONDS_PER_CASE
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def random_matrix(rows: int, columns: int) -> NDArray[np.float32]:
    import numpy as np

    return np.random.default_rng(rows + columns).standard_normal((rows, columns), np.float32)


def run_numba() -> dict[str, float]:
    start = time.perf_counter()
    import numba  # noqa: F401

    imported = time.perf_counter()
    from labkit.cpu.layers import activations
    from labkit.cpu.matmul.packed_linear import PackedLinear

    seconds = {
        "import numba": imported - start,
        "load cached kernels": time.perf_counter() - imported,
    }
    for rows, depth, width in PRODUCTS:
        packed, x = PackedLinear([random_matrix(width, depth)], [None]), random_matrix(rows, depth)
        seconds[f"product {rows}x{depth}x{width}"] = typical_seconds(
            functools.partial(packed.multiply, x)
        )
    for rows, width in GATES:
        gate = random_matrix(rows, width)
        seconds[f"swiglu {rows}x{width}"] = typical_seconds(
            functools.partial(activations.swiglu, gate, gate)
        )
    return seconds


def run_openblas() -> dict[str, float]:
    import numpy as np

    seconds = {}
    for rows, depth, width in PRODUCTS:
        weight, x = random_matrix(width, depth), random_matrix(rows, depth)
        seconds[f"product {rows}x{depth}x{width}"] = typical_seconds(
            functools.partial(np.matmul, x, weight.T)
        )
    return seconds


def run_mlx() -> dict[str, float]:
    import mlx.core as mx
    from mlx_lm.models.activations import swiglu

    def evaluate(gate: mx.array) -> None:
        mx.eval(swiglu(gate, gate))

    seconds = {}
    for rows, width in GATES:
        gate = mx.array(random_matrix(rows, width))
        seconds[f"swiglu {rows}x{width}"] = typical_seconds(functools.partial(evaluate, gate))
    return seconds


SIDES = {"numba": run_numba, "openblas": run_openblas, "mlx": run_mlx}


def measure(side: str) -> dict[str, float]:
    """Run one side (numba, openblas or mlx) in a fresh process; return its seconds by case."""
    threads = str(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OPENBLAS_NUM_THREADS": threads if side == "openblas" else "1",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--side", side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side]()))
        return
    measure("numba")  # fills the kernel cache
    rounds = [{side: measure(side) for side in SIDES} for _ in range(options.rounds)]
    print(f"medians of {options.rounds} rounds; ratio: how many times faster than the other side")
    print(f"{'operation':26}{'numba us':>10}{'other us':>12}{'ratio':>8}   ratios of the rounds")
    for name in rounds[0]["numba"]:
        ours = [entry["numba"][name] for entry in rounds]
        side = next((s for s in ("openblas", "mlx") if name in rounds[0][s]), None)
        if side is None:
            print(f"{name:26}{statistics.median(ours) * 1e6:10.0f}")
            continue
        theirs = [entry[side][name] for entry in rounds]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{name:26}{statistics.median(ours) * 1e6:10.1f}{statistics.median(theirs) * 1e6:12.1f}"
            f"{statistics.median(ratios):8.2f}   {min(ratios):.2f} to {max(ratios):.2f}"
        )
    for rows, depth, width in PRODUCTS:
        ours = [entry["numba"][f"product {rows}x{depth}x{width}"] for entry in rounds]
        speed = 2 * rows * depth * width / statistics.median(ours) / 1e9
        print(f"{f'product {rows}x{depth}x{width}':26}{speed:10.0f} GFLOP/s")


if __name__ == "__main__":
    main()
