"""Probes: small launches that together use every line of the kernels.

A probe compares the output with the oracle, and the report with counts derived from the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from metal_batches import Batch, attend, batch, check, prover

from labkit.kernel_constants import BQ
from labkit.metal.emulator.cpp_compilation import BuildKind
from labkit.metal.emulator.kernel_emulator import DEFAULT_SCHEDULES, Emulator
from labkit.metal.kernels import source


@dataclass(frozen=True)
class Probe:
    """A launch; ``sources`` are the kernel files whose faults it can detect."""

    make: Callable[[], Batch]
    kernel: str
    options: dict = field(default_factory=dict)
    switches: dict = field(default_factory=dict)
    equal_bits_with: dict | None = None  # switches that must not change a bit
    build: BuildKind = BuildKind.proof

    @property
    def sources(self):
        names = {"common", "resolve", self.kernel}
        return names | ({"reduce"} if "split_kv" in self.switches else set())


class WrongResult(AssertionError):
    """The launch ended without a fault, but its output or its report is wrong."""


def run(probe, edits=None, cpu_seconds=2.0):
    """Run a probe on kernels with ``edits`` {file: text}; raise on a fault or a wrong result."""
    emulator = prover(cpu_seconds)
    if probe.build is BuildKind.race:
        emulator = Emulator(DEFAULT_SCHEDULES, BuildKind.race, 100.0)
    b = probe.make()
    run_on = {
        "kernel": probe.kernel,
        "executor": lambda call: emulator(edited(call, edits or {})),
        **probe.options,
        **probe.switches,
    }
    out, evidence, dispatch = attend(b, **run_on)
    if probe.equal_bits_with is not None:
        other, _, _ = attend(b, **run_on | probe.equal_bits_with)
        if other.tobytes() != out.tobytes():
            raise WrongResult(f"{probe.equal_bits_with} changes the output")
    compared = {k: v for k, v in probe.options.items() if k != "window_skip"}
    try:
        check(b, out, **compared)
    except AssertionError as error:
        raise WrongResult(str(error)) from None
    expected = expected_evidence(b, probe, dispatch)
    actual = {name: getattr(evidence, name) for name in expected}
    if actual != expected or evidence.stamp != evidence.expected_stamp:
        raise WrongResult(f"report {actual}, expected {expected}, stamps {evidence}")


def edited(call, edits):
    """Return the call with changed kernel files in place of the originals."""
    header, body = call.header, call.body
    for name, text in edits.items():
        old, new = source(name).rstrip("\n"), text.rstrip("\n")
        header = header.replace(old, new)
        if call.name.endswith(f"_{name}"):
            body = text
    return replace(call, header=header, body=body)


def expected_evidence(b, probe, dispatch):
    """Return search iterations, visited blocks and surplus, derived from the batch alone."""
    cu, rows = b.cu_seqlens_q, 1 if probe.kernel == "decode" else BQ
    window = probe.options.get("window")
    skip = probe.options.get("window_skip", True)
    columns = b.q.shape[1] // dispatch.sharing_heads
    blocks = units = 0
    for s, length in enumerate(b.seq_lens):
        query_len = int(cu[s + 1] - cu[s])
        for row in range(0, query_len, rows):
            units += 1
            end = length - query_len + min(row + rows, query_len)
            begin = 0
            if window is not None and skip:
                begin = max(length - query_len + row + 1 - window, 0)
            blocks += -(-end // b.block_size) - begin // b.block_size
    x, y, z = dispatch.groups
    resolver = probe.switches.get("resolver", "binary_search")
    searched = sum(iterations(cu, unit, rows) for unit in range(y))
    heads = b.q.shape[1] // b.k_pool.shape[2]
    served = {"head": 1, "kv_head": heads, "token": b.q.shape[1], "auto": heads if rows == 1 else 1}
    assert x * served[probe.switches.get("unit", "head")] == b.q.shape[1]
    return {
        "search_iterations": searched * x * z if resolver == "binary_search" else 0,
        "kv_blocks_visited": blocks * columns,
        "surplus_threadgroups": x * (y * z - units * dispatch.partitions),
    }


def iterations(cu, unit, rows):
    """Return the steps of a binary search until one sequence is left."""
    keys = [c // rows + (i if rows > 1 else 0) for i, c in enumerate(cu)]
    answer = max(i for i, key in enumerate(keys) if key <= unit)
    candidates, steps = range(len(cu)), 0
    while len(candidates) > 1:
        low, high = candidates[0], candidates[-1]
        middle = (low + high + 1) // 2
        candidates = range(middle, high + 1) if answer >= middle else range(low, middle)
        steps += 1
    return steps


def _negative():
    # Logits near -2,000 in the window, as in the tests of the running maximum.
    b = batch([1, 10], [200, 90], heads=2)
    return replace(b, q=np.abs(b.q) + 1, k_pool=b.k_pool - 100.0)


def _bad_value():
    # One value is NaN in a slot that no window of the last ten tokens reaches.
    b = batch([10, 1], [70, 45], heads=2)
    v_pool = b.v_pool.copy()
    v_pool[b.block_tables[0, 3], 3] = np.nan  # token 51; windows of 9 begin at 52
    return replace(b, v_pool=v_pool)


def _shown_value():
    # The value of token 15 is NaN: the first row does not see it, the others do.
    b = batch([9], [23], heads=2)
    v_pool = b.v_pool.copy()
    v_pool[b.block_tables[0, 0], 15] = np.nan
    return replace(b, v_pool=v_pool)


def _racing():
    return batch([1], [150], heads=2, kv_heads=1, block_size=8)


SINKS = np.array([2.0, -5.0, 0.0, 30.0], np.float32)
ALL = {"window": 33, "softcap": 3.0, "sinks": SINKS}


def _mixed():
    return batch([1, 0, 35, 2], [300, 9, 77, 5], head_dim=80, block_size=8)


def _few():
    return batch([1, 0, 3, 2], [300, 9, 77, 5], head_dim=80, block_size=8)


def _mixed_half():
    # Ends on, before and after a tile of 32, a block of 16 and a matrix of 8; the longest
    # sequence last, so that a step past its table leaves the tables.
    lengths = [1, 0, 35, 35, 64], [90, 9, 73, 51, 97]
    return batch(*lengths, heads=2, kv_heads=1, dtype=mx.float16)


def _ragged():
    return batch([1, 0, 35, 2], [20, 9, 40, 2], heads=1, kv_heads=1)


def _optioned():
    return batch([1, 6], [100, 60], heads=4, kv_heads=1)


def _optioned_rows():
    # The window of the last sequence's first row begins at the end of a matrix of 8 keys.
    return batch([1, 36, 5], [100, 60, 44], heads=4, kv_heads=1)


def _steep():
    # Partitions' maxima lie hundreds apart: relative to any other maximum, weights overflow.
    return batch([1, 1, 1], [90, 1, 200], head_dim=80, spread=100.0)


def _pure_decode():
    return batch([1, 1, 1], [90, 3, 33])


PROBES = {
    "decode": Probe(_few, "decode"),
    "decode options": Probe(_optioned, "decode", ALL, {"unit": "auto"}),
    "decode masking": Probe(
        _bad_value, "decode", {"window": 9, "window_skip": False}, {}, {"window_skip": True}
    ),
    "decode negative": Probe(_negative, "decode", {"window": 20, "window_skip": False}),
    "decode long window": Probe(
        lambda: batch([1], [200], heads=2, block_size=8),
        "decode",
        {"window": 109},
        {},
        {"window_skip": False},
    ),
    "decode tokens": Probe(_optioned, "decode", ALL, {"unit": "token"}),
    "decode half": Probe(
        lambda: batch([1, 2], [40, 150], dtype=mx.bfloat16, block_size=32), "decode"
    ),
    "split": Probe(_pure_decode, "decode", {"sinks": SINKS}, {"split_kv": 3}),
    "split steep": Probe(_steep, "decode", {}, {"split_kv": 3}),
    "split padded": Probe(
        lambda: batch([1, 3], [70, 20]), "decode", {}, {"split_kv": 2, "resolver": "padded_grid"}
    ),
    "decode seq_map": Probe(_few, "decode", {}, {"resolver": "seq_map"}),
    "decode identity": Probe(_pure_decode, "decode", {}, {"resolver": "identity"}),
    "decode padded_grid": Probe(_few, "decode", {}, {"resolver": "padded_grid"}),
    "decode work_plan": Probe(_few, "decode", {}, {"resolver": "work_plan"}),
    "tiled": Probe(_mixed_half, "tiled"),
    "tiled options": Probe(_optioned_rows, "tiled", ALL),
    "tiled masking": Probe(
        _bad_value, "tiled", {"window": 6, "window_skip": False}, {}, {"window_skip": True}
    ),
    "tiled edge": Probe(_shown_value, "tiled"),
    "tiled tokens": Probe(_mixed, "tiled", {}, {"unit": "token"}),
    "tiled steep": Probe(lambda: batch([20, 9], [60, 9], heads=2, spread=100.0), "tiled"),
    "tiled skipping": Probe(_bad_value, "tiled", {"window": 9}),
    "tiled negative": Probe(_negative, "tiled", {"window": 20, "window_skip": False}),
    "tiled blocks of 8": Probe(_mixed, "tiled"),
    "tiled seq_map": Probe(_ragged, "tiled", {}, {"resolver": "seq_map"}),
    "tiled padded_grid": Probe(_ragged, "tiled", {}, {"resolver": "padded_grid"}),
    "tiled work_plan": Probe(_ragged, "tiled", {}, {"resolver": "work_plan"}),
}

# 200 times slower; they detect races that no schedule shows.
RACE_PROBES = {
    "race surplus": Probe(
        lambda: batch([1, 2], [9, 9], heads=1, kv_heads=1),
        "decode",
        {},
        {"resolver": "padded_grid"},
        build=BuildKind.race,
    ),
    "race decode": Probe(_racing, "decode", {}, {"unit": "auto"}, build=BuildKind.race),
    "race split": Probe(_racing, "decode", {}, {"split_kv": 2}, build=BuildKind.race),
    "race tiled": Probe(
        lambda: batch([9], [20], heads=1, kv_heads=1), "tiled", build=BuildKind.race
    ),
}
