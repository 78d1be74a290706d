"""Batches, the float64 oracle, and a function that runs a kernel on a batch."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from labkit.config import RESOLVERS
from labkit.engine.attention import kernel_dispatch
from labkit.engine.attention.backends.metal_backend import MetalBackend
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.engine.attention.sequence_resolvers.seq_map import SeqMapLookup
from labkit.engine.attention.sequence_resolvers.work_plan import WorkPlanLookup, work_plan
from labkit.kernel_constants import BQ
from labkit.metal.emulator.cpp_compilation import BuildKind
from labkit.metal.emulator.kernel_emulator import PROOF_SCHEDULES, Emulator

__all__ = [
    "RESOLVERS",
    "Batch",
    "Launcher",
    "attend",
    "batch",
    "check",
    "exact",
    "oracle",
    "prover",
]


def prover(cpu_seconds=60.0):
    """Return the strictest emulator: three schedules, compiled for proof."""
    return Emulator(PROOF_SCHEDULES, BuildKind.proof, cpu_seconds)


@dataclass(frozen=True)
class Batch:
    """Packed queries over a paged cache; values are exact in ``dtype``.

    Unused slots and blocks, which no query may see, are NaN or infinite.
    """

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    dtype: mx.Dtype

    @property
    def block_size(self):
        return self.k_pool.shape[1]


def batch(
    query_lens,
    contexts,
    *,
    heads=4,
    kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=mx.float32,
    seed=0,
    spread=1.0,
):
    """Return a batch on random blocks, none used twice; ``spread`` scales the queries."""
    rng = np.random.default_rng(seed)
    counts = [-(-c // block_size) for c in contexts]
    ids = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    tables = np.zeros((len(counts), max(counts)), np.int32)
    pools = np.empty((2, sum(counts) + 1, block_size, kv_heads, head_dim), np.float32)
    pools[0], pools[1] = np.nan, np.inf
    used = 0
    for s, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        tables[s, :count] = ids[used : used + count]
        used += count
        for b in range(count):
            n = min(block_size, context - b * block_size)
            pools[:, tables[s, b], :n] = rng.standard_normal((2, n, kv_heads, head_dim))
    q = rng.standard_normal((sum(query_lens), heads, head_dim)) * spread
    return Batch(
        exact(q, dtype),
        exact(pools[0], dtype),
        exact(pools[1], dtype),
        tables,
        np.array(contexts, np.int32),
        np.cumsum([0, *query_lens]).astype(np.int32),
        dtype,
    )


def exact(array, dtype):
    """Round to ``dtype`` and return float32, so that the oracle sees the same values."""
    return np.array(mx.array(np.asarray(array, np.float32)).astype(dtype).astype(mx.float32))


def oracle(b, *, scale, window=None, softcap=None, sinks=None):
    """Attend in float64, query by query and head by head; return (output, largest logit)."""
    out = np.zeros(b.q.shape)
    largest = 0.0
    group = b.q.shape[1] // b.k_pool.shape[2]
    for s, length in enumerate(b.seq_lens):
        first, end = b.cu_seqlens_q[s], b.cu_seqlens_q[s + 1]
        slots = [(b.block_tables[s, p // b.block_size], p % b.block_size) for p in range(length)]
        for t in range(first, end):
            stop = length - (end - first) + (t - first) + 1
            start = 0 if window is None else max(stop - window, 0)
            block, slot = np.array(slots[start:stop]).T
            for h in range(b.q.shape[1]):
                keys = b.k_pool[block, slot, h // group].astype(np.float64)
                values = b.v_pool[block, slot, h // group].astype(np.float64)
                logits = keys @ b.q[t, h].astype(np.float64) * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                largest = max(largest, np.abs(logits).max())
                extra = [] if sinks is None else [float(sinks[h])]
                top = max([logits.max(), *extra])
                weights = np.exp(logits - top)
                out[t, h] = weights @ values / (weights.sum() + sum(np.exp(np.array(extra) - top)))
    return out, largest


class Launcher(MetalBackend):
    """The backend with a forced kernel, and lookups that plain loops build."""

    def __init__(self, switches, executor, kernel="auto", maps=None):
        super().__init__(switches, "emulated", executor)
        self.kernel, self.maps = kernel, maps
        self.dispatch = None

    def _choose_kernel(self, plan, layer):
        self.dispatch = kernel_dispatch.choose_kernel(
            plan, layer, self._switches, self._limits, self.kernel
        )
        return self.dispatch

    def plan(self, **arrays):
        plan = super().plan(**arrays)
        if plan.resolver.variant == "seq_map":
            lookup = SeqMapLookup(*(self.maps or token_maps(plan.cu_seqlens_q)))
        elif plan.resolver.variant == "work_plan":
            lens = plan.cu_seqlens_q, plan.seq_lens
            lookup = WorkPlanLookup(work_plan(*lens, 1), work_plan(*lens, BQ))
        else:
            return plan
        return replace(plan, lookup=lookup)


def token_maps(cu):
    """Return the sequence of every token, and of every Q-block."""
    tokens = np.array([s for s in range(len(cu) - 1) for _ in range(cu[s], cu[s + 1])], np.int32)
    owners = np.full(cu[-1] // BQ + len(cu) - 1, -1, np.int32)
    for s in range(len(cu) - 1):
        for i in range(-(-(cu[s + 1] - cu[s]) // BQ)):
            owners[cu[s] // BQ + s + i] = s
    return tokens, owners


def attend(
    b,
    *,
    kernel="auto",
    executor=None,
    maps=None,
    scale=None,
    resolver="binary_search",
    split_kv="off",
    unit="head",
    window_skip=True,
    **options,
):
    """Run a batch, by default on three schedules; return (output in float32, report, dispatch)."""
    switches = KernelSwitches(resolver, split_kv, unit, window_skip)
    backend = Launcher(switches, executor or prover(), kernel, maps)
    q, *pools = (mx.array(a).astype(b.dtype) for a in (b.q, b.k_pool, b.v_pool))
    backend.adopt([pools[0]], [pools[1]])
    plan = backend.plan(
        block_tables=b.block_tables, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q
    )
    backend.bind(
        0, scale=b.q.shape[2] ** -0.5 if scale is None else scale, heads=b.q.shape[1], **options
    )
    out = backend.forward(0, q, None, None, plan)
    mx.eval(out, backend.pending(plan))
    (report,) = backend.report(plan)
    return np.array(out.astype(mx.float32)), report, backend.dispatch


ROUNDING = {mx.float32: 0.0, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def check(b, out, **options):
    """Compare with the oracle within the dtype's rounding; return error / tolerance."""
    scale = options.pop("scale", None) or b.q.shape[2] ** -0.5
    expected, largest = oracle(b, scale=scale, **options)
    finite = np.isfinite(expected)
    assert (np.isfinite(out) == finite).all(), "NaN or infinity differ from the oracle's"
    tolerance = 4e-6 * (1 + largest / 10) + ROUNDING[b.dtype]
    error = np.abs(out - expected)[finite].max() / np.abs(expected[finite]).max()
    assert error <= tolerance, f"error {error:.3g} of the largest value, {tolerance:.3g} allowed"
    return error / tolerance
