"""The thread pool under load: kernel launches on labkit's pool and on numba's threading layers.

    python benchmarks/thread_pool_under_load.py [--rounds 5] [--layers labkit,omp,workqueue,tbb]

Decode attention and one small matrix product run on each layer, in one process per layer. All
processes start first. Then they are measured in turns of a fraction of a second, in random order:
alone, beside one busy process, and beside two. A turn's result is its median launch time. The table
shows the medians of turns and, in brackets, the ratio to the same layer alone. The layer ``tbb``
is measured only if numba finds TBB: ``pip install tbb``, and add the folder of its library to the
loader's path.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LAYERS = ("labkit", "omp", "workqueue", "tbb")
DECODE = [(16, 16), (256, 16), (64, 128), (64, 512)]
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
PRODUCT = (16, 512, 1536)
TURN_S = 0.12
SETTLE_S = 0.1  # for new busy processes to get their share of the machine
SITUATIONS = ("alone", "one", "two")


def decode(sequences: int, context: int) -> Callable[[], object]:
    """Return a function that launches decode attention on shuffled blocks of 16."""
    import numpy as np

    from labkit.engine import attention

    rng = np.random.default_rng(0)
    blocks = -(-context // 16)
    shape = (sequences * blocks, 16, KV_HEADS, HEAD_DIM)
    k_pool, v_pool = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((sequences, HEADS, HEAD_DIM)).astype(np.float32)
    backend = attention.create()
    backend.adopt([k_pool], [v_pool])
    backend.bind(0, scale=HEAD_DIM**-0.5, heads=HEADS)
    plan = backend.plan(
        block_tables=rng.permutation(sequences * blocks).reshape(sequences, -1).astype(np.int32),
        seq_lens=np.full(sequences, context, np.int32),
        cu_seqlens_q=np.arange(sequences + 1, dtype=np.int32),
    )
    out = np.empty_like(q)

    def attend() -> object:
        backend.forward(0, q, None, None, plan, out)
        return backend.report(plan)

    return attend


def product() -> Callable[[], object]:
    """Return a function that multiplies matrices as a decode step of 16 requests does."""
    import numpy as np

    from labkit.cpu.matmul.packed_linear import PackedLinear

    rows, depth, width = PRODUCT
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, depth)).astype(np.float32) for n in (rows, width))
    packed = PackedLinear([weight], [None])
    return lambda: packed.multiply(x)


def run_layer(layer: str) -> None:
    """Measure one layer: read the name of a case from each input line and print its median (us)."""
    if layer != "labkit":
        from labkit.cpu.runtime import thread_pool

        # Kernels stay on the layer that the environment names.
        thread_pool.install = lambda: None  # type: ignore[assignment]
    launches = {f"decode {s} x {c}": decode(s, c) for s, c in DECODE}
    launches["linear {} x {} x {}".format(*PRODUCT)] = product()
    for launch in launches.values():
        launch()
    print(json.dumps(list(launches)), flush=True)
    for line in sys.stdin:
        launch, times = launches[line.strip()], list[tuple[float, float]]()
        launch(), launch()
        end = time.perf_counter() + TURN_S
        while len(times) < 5 or times[-1][1] < end:
            start = time.perf_counter()
            launch()
            times.append((start, time.perf_counter()))
        print(json.dumps(statistics.median(b - a for a, b in times) * 1e6), flush=True)


def start(layer: str) -> subprocess.Popen[str]:
    """Start a layer's process."""
    from labkit.machine.worker_environment import core_count, worker_environment

    cores = core_count()
    environment, _ = worker_environment(os.environ, threads=cores, cores=cores)
    if layer != "labkit":
        environment["NUMBA_THREADING_LAYER"] = layer
    command = [sys.executable, str(Path(__file__).resolve()), "--child", layer]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run ``count`` busy processes during the ``with`` block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure_case(process: subprocess.Popen[str], line: str) -> float:
    """Let a threading layer's process measure a case; return the median launch time (us)."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline()))


def measure(layers: list[str], rounds: int) -> None:
    """Start all layers, measure them in turns, and print the table."""
    processes = {layer: start(layer) for layer in layers}
    first = {layer: process.stdout.readline() for layer, process in processes.items()}  # type: ignore[union-attr]
    missing = [layer for layer, line in first.items() if not line]
    print(f"not available: {', '.join(missing)}" if missing else "", end="\n" if missing else "")
    processes = {layer: p for layer, p in processes.items() if layer not in missing}
    cases = json.loads(first["labkit"])
    times_us: dict[tuple[str, str, str], list[float]] = {}
    order = random.Random(0)
    for _ in range(rounds):
        for count, situation in enumerate(SITUATIONS):
            with busy_processes(count):
                turns = [(case, layer) for case in cases for layer in processes]
                order.shuffle(turns)
                for case, layer in turns:
                    us = measure_case(processes[layer], case)
                    times_us.setdefault((case, layer, situation), []).append(us)
    print_table(cases, list(processes), times_us)


def print_table(
    cases: list[str], layers: list[str], times_us: dict[tuple[str, str, str], list[float]]
) -> None:
    """Print medians (us) and ratios to the same layer alone."""
    print(f"{'case':26}{'layer':11}{'alone':>9}{'to omp':>8}{'beside one':>18}{'beside two':>18}")
    for case in cases:
        for layer in layers:
            alone, one, two = (statistics.median(times_us[case, layer, s]) for s in SITUATIONS)
            to = statistics.median(times_us[case, "omp", "alone"]) if "omp" in layers else alone
            print(
                f"{case:26}{layer:11}{alone:9.0f}{alone / to:8.2f}"
                f"{one:11.0f} ({one / alone:4.1f}){two:11.0f} ({two / alone:4.1f})"
            )


def main() -> None:
    """Measure the chosen layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--child", choices=LAYERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_layer(options.child)
    else:
        measure(options.layers.split(","), options.rounds)


if __name__ == "__main__":
    main()
