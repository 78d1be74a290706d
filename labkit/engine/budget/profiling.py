"""The profiling forward: what the largest step allocates besides weights and KV."""

from __future__ import annotations

import sys
import tracemalloc
from typing import TYPE_CHECKING

from labkit import config
from labkit.engine.input_builder import Batch, InputBuilder
from labkit.engine.request import Request, RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.forward import Forward
    from labkit.engine.kv_layout.kv_cache import KVCache, LayerShape, LayoutKind

STEP = 1 << 20  # bytes: rounded up to it, so that equal arms get equal pools


def activation_bytes(
    forward: Forward,
    kind: LayoutKind,
    shapes: tuple[LayerShape, ...],
    scheduler: config.Scheduler,
) -> int:
    """Run the largest step twice and return the second's peak (bytes, NumPy's and MLX's).

    The step is ``max_num_batched_tokens`` prompt tokens of ``max_num_seqs`` requests, all
    of which sample. The first forward compiles and fills caches.
    """
    lengths = prompt_lengths(scheduler)
    layout = kind.holding(shapes, len(lengths), max(lengths))
    batch, step = layout.memory.plan(largest_step(lengths, layout.cache))
    forward(batch, step, Counters())
    mlx_before = _mlx_active()
    tracemalloc.start(1)
    try:
        forward(batch, step, Counters())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    peak += max(0, _mlx_peak() - mlx_before)
    return -(-peak // STEP) * STEP


def prompt_lengths(scheduler: config.Scheduler) -> list[int]:
    """Return how many tokens of each request the largest step computes."""
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    return [tokens // rows + (row < tokens % rows) for row in range(rows)]


def largest_step(lengths: list[int], cache: KVCache) -> Batch:
    """Return the batch of whole prompts of these lengths, token ids all 0."""
    states = [RequestState(Request(str(row), (0,) * n)) for row, n in enumerate(lengths)]
    for state in states:
        cache.reserve(state, state.num_tokens)
    chunks = tuple(ScheduledChunk(state, 0, state.num_tokens) for state in states)
    return InputBuilder(cache).build(SchedulerOutput(chunks))


def _mlx_active() -> int:
    """Return MLX's bytes in use, and start its peak anew (0 where MLX is not loaded)."""
    if "mlx.core" not in sys.modules:
        return 0
    import mlx.core as mx

    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def _mlx_peak() -> int:
    if "mlx.core" not in sys.modules:
        return 0
    import mlx.core as mx

    return int(mx.get_peak_memory())
