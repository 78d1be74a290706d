"""Paged attention on the CPU: share of this machine's peak rates, and speed against MLX.

    python benchmarks/cpu_attention.py [--rounds 9]

Decode is limited by memory, so its K and V bytes per second are compared with the best reading
rate. Prefill is limited by arithmetic, so its FLOP per second (without the masked half) are
compared with those of NumPy's sgemm (OpenBLAS), which runs one single-threaded product on every
core at once. These two limits are measured in the same process as the kernels, in every round. A
kernel's figure is the median of rounds. A limit is the best round. The paired share is the median
over rounds of the kernel's rate divided by the limit of the same round. Decode is measured with KV
pools of every dtype in every round. MLX's own ``scaled_dot_product_attention``
does the same work on contiguous arrays, with OpenBLAS, in a process of its own, because two
spinning thread pools slow each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

DECODE = [
    (32, 2048, 16, 4, 128),
    (32, 2048, 16, 8, 128),
    (32, 2048, 8, 4, 64),
    (64, 2048, 9, 3, 64),  # heads of smollm2
]
PREFILL = [(8, 512, 16, 4, 128), (8, 512, 16, 8, 128), (8, 512, 8, 4, 64)]
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
SGEMM_SIZE = 2048


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def reader(array: np.ndarray) -> Callable[[], object]:
    """Return a function that reads ``array`` with all threads, to measure the reading rate."""
    from numba import get_num_threads

    from labkit.cpu.roofline_peaks import read_memory

    flat, parts = array.reshape(-1), 8 * get_num_threads()
    return lambda: read_memory(flat, parts)


def launcher(
    sequences: int,
    queries: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: str = "float32",
) -> tuple[Callable[[], object], NDArray[Any]]:
    """Return a function that computes paged attention once, and the K pool that it reads.

    Each sequence's KV blocks, of 16 tokens, are scattered over the pool.
    """
    from labkit.cpu.precision import kv_dtypes, kv_quantization_reference
    from labkit.engine import attention

    random = np.random.default_rng(0)
    blocks = -(-context // 16)
    tables = random.permutation(sequences * blocks).reshape(sequences, blocks).astype(np.int32)
    shape = (sequences * blocks, 16, kv_heads, head_dim)
    pattern = random.standard_normal((64, *shape[1:])).astype(np.float32)
    if kv_dtype in kv_dtypes.QUANTIZED_BITS:
        pattern = kv_quantization_reference.quantize(pattern, kv_dtype)
    else:
        pattern = kv_dtypes.from_float32(pattern, kv_dtype)
    k_pool, v_pool = (np.resize(pattern, (*shape[:3], pattern.shape[3])) for _ in range(2))
    q = random.standard_normal((sequences * queries, heads, head_dim)).astype(np.float32)
    backend = attention.create()
    backend.adopt([k_pool], [v_pool])
    backend.bind(0, scale=head_dim**-0.5, heads=heads)
    plan = backend.plan(
        block_tables=tables,
        seq_lens=np.full(sequences, context, dtype=np.int32),
        cu_seqlens_q=(np.arange(sequences + 1) * queries).astype(np.int32),
    )
    out = np.empty_like(q)

    def attend() -> object:
        backend.forward(0, q, None, None, plan, out)
        return backend.report(plan)

    return attend, k_pool


def measure_decode(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield, by case and KV dtype, the GB/s of decode attention and of plain reading."""
    for sequences, context, heads, kv_heads, head_dim in DECODE:
        shape = (sequences, 1, context, heads, kv_heads, head_dim)
        attends, pools = zip(*(launcher(*shape, kind) for kind in KV_DTYPES), strict=True)
        turns = [reader(pools[0]), *attends]
        for turn in turns:
            turn()
        reading, *times = np.array([[seconds(t) for t in turns] for _ in range(rounds)]).T
        for kind, pool, attending in zip(KV_DTYPES, pools, times, strict=True):
            share = pool.nbytes / pools[0].nbytes
            yield {
                "case": f"decode {sequences} x {context}, {heads}/{kv_heads} heads of {head_dim}",
                "kv_dtype": kind,
                "ours_us": float(np.median(attending)) * 1e6,
                "rate": 2 * pool.nbytes / float(np.median(attending)) / 1e9,
                "limit": pools[0].nbytes / float(reading.min()) / 1e9,
                "paired": float(np.median(2 * reading * share / attending)),
                "gain": float(np.median(times[0] / attending)),
            }


def multiplier() -> Callable[[], object]:
    """Return a function that runs one product of ``SGEMM_SIZE`` matrices per core, in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    from labkit.machine.worker_environment import core_count

    cores = core_count()
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, cores, SGEMM_SIZE, SGEMM_SIZE), dtype=np.float32)
    out, threads = np.empty_like(a), ThreadPoolExecutor(cores)
    return lambda: list(threads.map(np.matmul, a, b, out))


def measure_prefill(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield, by case, the useful GFLOP/s of prefill attention and the GFLOP/s of sgemm."""
    from labkit.machine.worker_environment import core_count

    multiply = multiplier()
    sgemm_flop = 2 * SGEMM_SIZE**3 * core_count()
    for sequences, length, heads, kv_heads, head_dim in PREFILL:
        attend, _ = launcher(sequences, length, length, heads, kv_heads, head_dim)
        turns = [multiply, attend]
        for turn in turns:
            turn()
        times = np.array([[seconds(turn) for turn in turns] for _ in range(rounds)])
        multiplying, attending = times.T
        flop = 4 * sequences * heads * head_dim * length * (length + 1) / 2
        yield {
            "case": f"prefill {sequences} x {length}, {heads}/{kv_heads} heads of {head_dim}",
            "ours_us": float(np.median(attending)) * 1e6,
            "rate": flop / float(np.median(attending)) / 1e9,
            "limit": sgemm_flop / float(multiplying.min()) / 1e9,
            "paired": float(np.median(flop / attending * multiplying / sgemm_flop)),
        }


def measure_mlx(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield, by case, the time of MLX's attention on contiguous arrays of the same shape."""
    from labkit.machine import openblas_for_mlx
    from labkit.machine.worker_environment import core_count

    try:
        openblas_for_mlx.activate("openblas", core_count())
    except openblas_for_mlx.BlasUnavailable:
        openblas_for_mlx.activate("stock", core_count())
    import mlx.core as mx

    cases: list[tuple[str, int, int, int, int, int, int]]
    cases = [("decode", s, 1, c, h, kv, d) for s, c, h, kv, d in DECODE]
    cases += [("prefill", s, n, n, h, kv, d) for s, n, h, kv, d in PREFILL]
    for kind, sequences, queries, context, heads, kv_heads, head_dim in cases:
        q = mx.random.normal((sequences, heads, queries, head_dim))
        k, v = (mx.random.normal((sequences, kv_heads, context, head_dim)) for _ in range(2))
        mask = "causal" if kind == "prefill" else None
        mx.eval(q, k, v)

        scale = head_dim**-0.5

        def attend(
            q: Any = q, k: Any = k, v: Any = v, mask: str | None = mask, scale: float = scale
        ) -> None:
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask))

        attend()
        times = [seconds(attend) for _ in range(rounds)]
        name = f"{kind} {sequences} x {context}, {heads}/{kv_heads} heads of {head_dim}"
        yield {"case": name, "mlx_us": float(np.median(times)) * 1e6}


PARTS = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "mlx": measure_mlx,
}


def in_process(part: str, rounds: int) -> list[dict[str, Any]]:
    """Measure one part in a fresh process with a clean environment."""
    inherited = ("OPENBLAS_", "OMP_", "GOMP_", "NUMBA_NUM_THREADS", "MKL_", "MLX_")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(inherited)}
    if part in ("decode", "prefill"):
        environment["OPENBLAS_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--part", part, "--rounds", str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Measure every part and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", choices=PARTS)
    arguments = parser.parse_args()
    if arguments.part:
        for row in PARTS[arguments.part](arguments.rounds):
            print(json.dumps(row), flush=True)
        return
    decode = in_process("decode", arguments.rounds)
    prefill = in_process("prefill", arguments.rounds)
    mlx = {row["case"]: row["mlx_us"] for row in in_process("mlx", max(3, arguments.rounds // 3))}
    print(f"{'case':42} {'us':>9} {'rate':>8} {'limit':>8} {'share':>6} {'MLX us':>9} {'x MLX':>6}")
    for row in decode + prefill:
        print(
            f"{row['case']:42} {row['ours_us']:9.0f} {row['rate']:8.1f} {row['limit']:8.1f} "
            f"{row['rate'] / row['limit']:6.0%} {mlx[row['case']]:9.0f} "
            f"{mlx[row['case']] / row['ours_us']:6.1f}"
            f"   paired share {row['paired']:.0%}"
            + (f", {row['kv_dtype']} x {row['gain']:.2f}" if "kv_dtype" in row else "")
        )
    print("rates: decode GB/s of K and V against reading, prefill useful GFLOP/s against sgemm")


if __name__ == "__main__":
    main()
