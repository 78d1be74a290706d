"""Host time of launching Metal attention, measured with a kernel that does nothing.

    python benchmarks/metal_launch_overhead.py [--rounds 30]

Three parts are timed. *Plan*, once per step: check the batch, build maps and device arrays, choose
a kernel. *A layer*, once per layer: build the nodes of MLX's graph for the KV write and the launch;
nothing is evaluated. *Report*, once per step: read the stamps and counters that all layers' kernels
wrote. Times are medians over rounds, in us.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from labkit.engine import attention
from labkit.engine.attention.backends.metal_backend import MetalBackend
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.metal.kernel_call import KernelCall

Backend = TypeVar("Backend", bound=Any)

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 16, 4, 128, 16, 8
# (name, sequences, query tokens of each, context of each)
CASES = [
    ("64 decodes", 64, 1, 128),
    ("1,024 decodes", 1024, 1, 128),
    ("8 prompts of 512", 8, 512, 512),
]


class NullExecutor:
    """An executor whose kernels do nothing: outputs are zeros, one set per kernel and grid."""

    def __init__(self) -> None:
        self._outputs: dict[Any, list[mx.array]] = {}

    def __call__(self, call: KernelCall) -> list[mx.array]:
        """Return cached zeros for the outputs of a kernel call."""
        key = (call.name, call.groups)
        if key not in self._outputs:
            self._outputs[key] = [mx.zeros(shape, dtype) for _, shape, dtype in call.outputs]
            mx.eval(self._outputs[key])
        return self._outputs[key]


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Call a function. Return its result and the microseconds that it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, (time.perf_counter() - start) * 1e6


def planner(backend: Any, sequences: int, queries: int, context: int) -> Callable[[], Any]:
    """Return a function that plans a step and prepares its launches."""
    blocks = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
    arrays = {
        "block_tables": tables.reshape(sequences, blocks),
        "seq_lens": np.full(sequences, context, np.int32),
        "cu_seqlens_q": np.arange(0, sequences * queries + 1, queries, dtype=np.int32),
    }

    def plan() -> Any:
        metadata = backend.plan(**arrays)
        backend.prepare(metadata, backend.bound_layer(0))
        return metadata

    return plan


def bind_layers(backend: Backend, pools: Any) -> Backend:
    """Give a backend its KV pools, bind every layer, and return the backend."""
    backend.adopt(*pools)
    for layer in range(LAYERS):
        backend.bind(layer, scale=HEAD_DIM**-0.5, heads=Q_HEADS)
    return backend


def measure(sequences: int, queries: int, context: int, rounds: int) -> dict[str, float]:
    """Return median times (us): of a plan for Metal and for the CPU, of a layer, of a report."""
    shape = (sequences * -(-context // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    empty = np.zeros(shape, np.float32)  # never written
    metal = MetalBackend(KernelSwitches(), "emulated", NullExecutor())
    cpu = bind_layers(attention.create(), [[empty] * LAYERS] * 2)
    bind_layers(
        metal, [[mx.zeros(shape) for _ in range(LAYERS)] for _ in range(2)]
    )  # never evaluated
    original = list(metal.keys), list(metal.values)
    tokens = sequences * queries
    q = mx.zeros((tokens, Q_HEADS, HEAD_DIM))
    k = v = mx.zeros((tokens, KV_HEADS, HEAD_DIM))
    mx.eval(q, k)
    plan_metal, plan_cpu = (planner(b, sequences, queries, context) for b in (metal, cpu))
    times: dict[str, list[float]] = {name: [] for name in ("plan", "plan_cpu", "layer", "report")}
    for _ in range(rounds):
        times["plan_cpu"].append(timed(plan_cpu)[1])
        metadata, plan_us = timed(plan_metal)
        times["plan"].append(plan_us)
        metal.keys, metal.values = ([mx.zeros(shape) for _ in pools] for pools in original)
        metal.write(0, k, v, metadata)  # the first write computes the slots
        for layer in range(LAYERS):
            times["layer"].append(timed(metal.forward, layer, q, k, v, metadata)[1])
        times["report"].append(timed(metal.report, metadata)[1])
    return {name: median(samples) for name, samples in times.items()}


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    gc.disable()
    print(
        f"{'us':18} {'plan':>7} {'on cpu':>7} {'ratio':>6} {'a layer':>8} {'report, a layer':>16}"
    )
    for name, sequences, queries, context in CASES:
        times = measure(sequences, queries, context, rounds)
        times["ratio"] = times["plan"] / times["plan_cpu"]
        times["report"] /= LAYERS
        row = [times[key] for key in ("plan", "plan_cpu", "ratio", "layer", "report")]
        print(f"{name:18}" + "".join(f"{number:14.1f}" for number in row))


if __name__ == "__main__":
    main()
