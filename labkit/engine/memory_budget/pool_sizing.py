"""How the worker sizes the KV pool: from the loaded model's KV shapes and its activations."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.memory_budget import footprint, model_footprint, plan
from labkit.engine.memory_budget.budget_decision import BudgetDecision, BudgetRefusal
from labkit.engine.memory_budget.budget_policies import PROFILING_POLICIES
from labkit.engine.model.dtype_resolution import WeightLoading
from labkit.engine.request import Request, RequestState
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput

if TYPE_CHECKING:
    from labkit.engine.attention.kv_and_state_shapes import KVShape, StateShape
    from labkit.engine.kv_cache_interface import KVCacheFactory, KVCacheManager
    from labkit.engine.runner.packed_forward import PackedForward
    from labkit.machine.facts.memory_capacity import MemoryProfile

# A profiling forward of more operations than this takes seconds, so the activations are estimated
# instead.
MAX_PROFILING_FLOPS = 200e9
# Measurements are rounded up to multiples of this, so that equal arms get equal pools.
ROUNDING_BYTES = 1 << 20


def check_before_loading(options: config.Engine, model_dir: Path, machine: MemoryProfile) -> None:
    """Raise ``EngineError`` (one line) if the policy refuses a budget whose sizes are known."""
    model = footprint(options, model_dir)
    result = None if model is None else plan(options, model, machine)
    if isinstance(result, BudgetRefusal):
        raise EngineError(str(result))


def size_pool(
    options: config.Engine,
    model_dir: Path,
    machine: MemoryProfile,
    shapes: tuple[KVShape, ...],
    measure: Callable[[], int],
    states: tuple[StateShape, ...] = (),
    draft_bytes: int = 0,
) -> BudgetDecision:
    """Size the KV pool of a loaded model. Raise ``EngineError`` if the policy refuses the budget.

    ``machine``: the memory before the model was loaded. ``shapes``: the KV shape of each layer, the
    draft model's included. ``measure``: runs the largest step and returns the bytes of its
    activations; it is called if the policy subtracts them and the step is cheap, or if config.json
    lacks the sizes to estimate them. ``states``: the shape of a request's state in each layer that
    has one. ``draft_bytes``: of the draft model's weights.
    """
    # A rank's shapes count only that rank's heads; the budget counts the pools of all ranks.
    per_token = options.parallel.size * sum(shape.token_bytes() for shape in shapes)
    weights = model_dir, WeightLoading.of(options)
    known = model_footprint.from_directory(*weights)
    model = replace(
        known or model_footprint.from_weights(*weights),
        kv_bytes_per_token=per_token,
        state_bytes=options.parallel.size * sum(state.nbytes for state in states),
        draft_bytes=draft_bytes,
    )
    flops = 2 * model.matmul_weights * options.scheduler.max_step_tokens
    profile = known is None or (
        options.budget.policy in PROFILING_POLICIES and flops <= MAX_PROFILING_FLOPS
    )
    result = plan(options, model, machine, activations=measure() if profile else None)
    if isinstance(result, BudgetRefusal):
        raise EngineError(str(result))
    return result


def measure_activation_bytes(
    forward: PackedForward,
    kind: KVCacheFactory,
    shapes: tuple[KVShape, ...],
    scheduler: config.Scheduler,
    logit_rows: int,
) -> int:
    """Run the largest step and return its peak bytes, NumPy's and MLX's together.

    The step has ``max_step_tokens`` prompt tokens of ``max_num_seqs`` requests, and ``logit_rows``
    rows of logits. It runs twice: the first forward compiles and fills caches, so only the second
    is measured. The result is rounded up to a multiple of ``ROUNDING_BYTES``.
    """
    tokens, rows = scheduler.max_step_tokens, scheduler.max_num_seqs
    lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
    kv_cache = kind.create_for(shapes, len(lengths), max(lengths))
    largest = _largest_step(lengths, kv_cache.manager)
    last_rows = np.arange(tokens - logit_rows, tokens, dtype=np.int32)
    batch, step = kv_cache.prepare_step(largest._replace(logit_rows=last_rows))
    forward(batch, step, Counters())
    mx: Any = sys.modules.get("mlx.core")  # None: the model runs without it
    if mx is not None:
        mx.reset_peak_memory()
        mlx_before = mx.get_active_memory()
    tracemalloc.start(1)
    try:
        forward(batch, step, Counters())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if mx is not None:
        peak += max(0, int(mx.get_peak_memory()) - mlx_before)
    return -(-peak // ROUNDING_BYTES) * ROUNDING_BYTES


def _largest_step(lengths: list[int], cache: KVCacheManager) -> Batch:
    """Return a batch that prefills one prompt for each of ``lengths``. All token ids are 0."""
    states = [RequestState(Request(str(row), (0,) * n)) for row, n in enumerate(lengths)]
    for state in states:
        cache.reserve(state, state.num_tokens)
    chunks = tuple(ScheduledChunk(state, 0, state.num_tokens) for state in states)
    return InputBuilder(cache).build(SchedulerOutput(chunks))
