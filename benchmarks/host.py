"""What the host takes to launch Metal attention, with a kernel that does nothing.

    python benchmarks/host.py [--rounds 30]

Planning is done once per step: checks, maps, the device's arrays, the choice of a kernel. A
layer's write and launch are nodes of MLX's graph, built once per layer; nothing is evaluated.
Reading what the kernels wrote is done once per step for all layers. Medians of rounds, us.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median

import mlx.core as mx
import numpy as np

from labkit.engine import attention
from labkit.engine.attention.kernel_switches import KernelSwitches
from labkit.engine.attention.metal_backend import MetalBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LAYERS = 16, 4, 128, 16, 8
# (name, sequences, query tokens of each, context of each)
CASES = [
    ("64 decodes", 64, 1, 128),
    ("1,024 decodes", 1024, 1, 128),
    ("8 prompts of 512", 8, 512, 512),
]


class Nothing:
    """An executor whose kernels leave zeros, made once per shape."""

    def __init__(self):
        self._made = {}

    def __call__(self, call):
        """Return the outputs of a kernel that did nothing."""
        key = (call.name, call.groups)
        if key not in self._made:
            self._made[key] = [mx.zeros(shape, dtype) for _, shape, dtype in call.outputs]
            mx.eval(self._made[key])
        return self._made[key]


def timed(function, *arguments):
    """Return what a call returns, and its time (us)."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, (time.perf_counter() - start) * 1e6


def planner(backend, sequences, queries, context):
    """Return a function that plans a step and prepares its one kind of layers."""
    blocks = -(-context // BLOCK)
    tables = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
    arrays = {
        "block_tables": tables.reshape(sequences, blocks),
        "seq_lens": np.full(sequences, context, np.int32),
        "cu_seqlens_q": np.arange(0, sequences * queries + 1, queries, dtype=np.int32),
    }

    def plan():
        planned = backend.plan(**arrays)
        backend.prepare(planned, backend.bound_layer(0))
        return planned

    return plan


def bound(backend, pools):
    """Hand pools over and bind every layer."""
    backend.adopt(*pools)
    for layer in range(LAYERS):
        backend.bind(layer, scale=HEAD_DIM**-0.5, heads=HEADS)
    return backend


def measure(sequences, queries, context, rounds):
    """Return the times of a step: planning here and on the CPU, a layer, the report."""
    shape = (sequences * -(-context // BLOCK), BLOCK, KV_HEADS, HEAD_DIM)
    empty = np.zeros(shape, np.float32)  # never touched
    metal = MetalBackend(KernelSwitches(), "emulated", Nothing())
    cpu = bound(attention.create(), [[empty] * LAYERS] * 2)
    bound(metal, [[mx.zeros(shape) for _ in range(LAYERS)] for _ in range(2)])  # never evaluated
    original = list(metal.keys), list(metal.values)
    tokens = sequences * queries
    q = mx.zeros((tokens, HEADS, HEAD_DIM))
    k = v = mx.zeros((tokens, KV_HEADS, HEAD_DIM))
    mx.eval(q, k)
    plan_metal, plan_cpu = (planner(b, sequences, queries, context) for b in (metal, cpu))
    times = {name: [] for name in ("plan", "plan_cpu", "layer", "report")}
    for _ in range(rounds):
        times["plan_cpu"].append(timed(plan_cpu)[1])
        plan, planning = timed(plan_metal)
        times["plan"].append(planning)
        metal.keys, metal.values = ([mx.zeros(shape) for _ in pools] for pools in original)
        metal.write(0, k, v, plan)  # the first write makes the slots
        for layer in range(LAYERS):
            times["layer"].append(timed(metal.forward, layer, q, k, v, plan)[1])
        times["report"].append(timed(metal.report, plan)[1])
    return {name: median(found) for name, found in times.items()}


def main() -> None:
    """Measure every case and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    gc.disable()
    print(
        f"{'us':18} {'plan':>7} {'on cpu':>7} {'ratio':>6} {'a layer':>8} {'report, a layer':>16}"
    )
    for name, *batch in CASES:
        found = measure(*batch, rounds)
        found["ratio"] = found["plan"] / found["plan_cpu"]
        found["report"] /= LAYERS
        row = [found[key] for key in ("plan", "plan_cpu", "ratio", "layer", "report")]
        print(f"{name:18}" + "".join(f"{number:14.1f}" for number in row))


if __name__ == "__main__":
    main()
