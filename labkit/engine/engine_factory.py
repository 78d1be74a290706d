"""Create an engine from a config: labkit's, with its self-test, mlx_lm's, a server or a class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from labkit import config
from labkit.engine import kernel_precompilation, speculation, user_classes
from labkit.engine.engine_protocol import (
    Counters,
    EngineError,
    FinishReason,
    InferenceEngine,
    TokenEvent,
)
from labkit.engine.kv_cache_interface import KVCache, KVCacheFactory
from labkit.engine.kv_layout import window_pools
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.memory_budget.budget_decision import BudgetDecision
from labkit.engine.memory_budget.pool_sizing import (
    check_before_loading,
    measure_activation_bytes,
    size_pool,
)
from labkit.engine.model import dtype_resolution
from labkit.engine.runner import logits_self_test
from labkit.engine.runner.decode_padding import DecodePadding
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.runner.model_runner import ModelRunner, PerRequestRunner
from labkit.engine.runner.shared_models import PreparedModel, SharedModels
from labkit.engine.runner.step_launchers import create_launcher
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.speculation.draft_model import LoadedDraft, load_draft
from labkit.engine.step_loop import NoScheduleCheck, StepLoop
from labkit.machine.facts import memory_capacity, wired_advice
from labkit.machine.facts.simulated_macs import find_profile

if TYPE_CHECKING:
    from labkit.engine.parallel.mlx_ring import Ring

ENGINE_METHODS = (
    "submit",
    "abort",
    "step",
    "has_work",
    "counters",
    "reset_counters",
    "clear_cache",
    "close",
)
FINISH_REASONS = (None, *get_args(FinishReason))


def create(
    options: config.Engine, model_dir: Path, models: SharedModels | None = None
) -> InferenceEngine:
    """Load a model and create the engine that ``options`` describes.

    ``options`` is the group ``engine`` of a checked config, ``model_dir`` a directory with
    config.json and model*.safetensors. If ``options.name`` is ``package.module:Class``, that class
    is called with both. ``models`` are shared with engines that step alternately with this one
    (None: no sharing). Raises ``EngineError`` if the model cannot be served with these options. The
    message gives the reason.
    """
    _check_preconditions(options)
    model_dir, models = Path(model_dir), models or SharedModels()
    if config.is_class_path(options.name):
        return _create_plugin(options, model_dir)
    if options.name == "mlx_lm":
        from labkit.engine.mlx_lm.batch_generator import MlxLmEngine

        return MlxLmEngine(
            models.load_mlx_lm(model_dir, dtype_resolution.WeightLoading.of(options)),
            options.scheduler.max_num_seqs,
            options.scheduler.chunk,
        )
    if options.name == "openai":
        from labkit.engine import openai

        return openai.create(options, model_dir)
    wait_for_kernels = kernel_precompilation.start(options, model_dir)
    if not options.parallel.single_process:
        wait_for_kernels()
        from labkit.engine.parallel import tensor_parallel_engine

        return tensor_parallel_engine.create(options, model_dir)
    return _create_own(options, model_dir, models, NoScheduleCheck(), wait_for_kernels)


def create_rank(
    options: config.Engine, model_dir: Path, ring: Ring, schedule_check: NoScheduleCheck
) -> LLMEngine:
    """Create one rank's engine over its share of the model, or raise ``EngineError``."""
    _check_preconditions(options)
    return _create_own(options, model_dir, SharedModels(ring), schedule_check)


def _create_own(
    options: config.Engine,
    model_dir: Path,
    models: SharedModels,
    schedule_check: NoScheduleCheck,
    wait_for_kernels: Callable[[], None] = lambda: None,
) -> LLMEngine:
    """Load the model, run the self-test, size the pool, and assemble the parts."""
    if options.attention.resolver == "identity":
        raise EngineError(
            "engine.attention.resolver=identity: it handles decode only, and "
            "requests need a prefill; set another resolver"
        )
    KVCacheFactory(options)  # raises now rather than after the model is loaded
    machine = find_profile(options.budget.machine)
    check_before_loading(options, model_dir, machine)
    prepared = models.prepare(
        model_dir,
        options.kv.block_size,
        options.attention.device,
        loading=dtype_resolution.WeightLoading.of(options),
        # Compile only for few shapes, because MLX keeps a graph for each.
        compiled=options.decode_shape is not config.DecodeShape.exact,
        activations=options.activations,
        wait_for_kernels=wait_for_kernels,
    )
    forward, expected, cached = prepared.forward, prepared.expected, prepared.expected.cached
    windows = prepared.loaded.windows
    if options.kv.window_pools:
        window_pools.check_windows(windows, prepared.loaded.model_type)
    if options.forward is config.Forward.per_request and cached.states:
        raise EngineError(
            f"engine.forward=per_request: model_type={prepared.loaded.model_type} has recurrent "
            "states, which a step updates for all requests at once; set engine.forward=batched"
        )
    if not cached.attention and options.kv.dtype is not config.KVDType.float32:
        raise EngineError(
            f"engine.kv.dtype={options.kv.dtype.value}: model_type={prepared.loaded.model_type} "
            "has recurrent states, which it does not change, and no keys and values; set "
            "engine.kv.dtype=float32"
        )
    factory = KVCacheFactory(options, cached.dtype, cached.states, windows)
    small = expected.create_kv_cache(factory)
    dtypes = options.kv.dtype.value, options.activations.value
    difference = logits_self_test.verify(prepared.loaded, forward, small, expected, *dtypes)
    if options.batch_invariant:
        logits_self_test.require_batch_invariance(options, forward, factory, expected)

    draft = load_draft(options, model_dir, factory, expected, models)
    shapes = cached.attention + (draft.shapes if draft else ())
    budget = size_pool(
        options,
        model_dir,
        machine,
        shapes,
        lambda: measure_activation_bytes(
            forward, factory, cached.attention, options.scheduler, options.max_decode_rows
        ),
        cached.states,
        draft.weight_bytes if draft else 0,
    )
    memory_capacity.trim_heap()  # frees what the self-test computed
    kv_cache = factory.create(shapes, budget.blocks)
    return _assemble(options, prepared, kv_cache, draft, budget, difference, schedule_check)


def _assemble(
    options: config.Engine,
    prepared: PreparedModel,
    kv_cache: KVCache,
    draft: LoadedDraft | None,
    budget: BudgetDecision,
    difference: float,
    schedule_check: NoScheduleCheck,
) -> LLMEngine:
    forward, expected = prepared.forward, prepared.expected
    counters, draft_counters = Counters(), Counters()
    vocab_size = expected.logits[0].shape[-1]
    per_request = options.forward is config.Forward.per_request
    runner = PerRequestRunner if per_request else ModelRunner
    replay = options.graph_replay
    run_model = runner(forward, kv_cache, counters, replay=replay)
    run_draft = None
    if draft:
        run_draft = ModelRunner(draft.forward, kv_cache, draft_counters, replay=replay)
    eos_token_ids = prepared.loaded.eos_token_ids
    scheduler = Scheduler(options.scheduler, kv_cache.manager, eos_token_ids)
    loop = StepLoop(
        options.pipeline,
        scheduler,
        InputBuilder(kv_cache.manager, speculation.segment_layout(options)),
        DecodePadding(
            options.decode_shape, options.max_decode_rows, counters, options.decode_sizes
        ),
        create_launcher(options.pipeline, run_model, counters),
        speculation.create(
            options, kv_cache.manager, run_draft, counters, vocab_size, eos_token_ids
        ),
        counters,
        schedule_check,
    )
    return LLMEngine(
        scheduler=scheduler,
        cache=kv_cache.manager,
        loop=loop,
        counters=counters,
        draft_counters=draft_counters,
        vocab_size=vocab_size,
        max_context=prepared.loaded.max_context,
        notes={
            "model_type": prepared.loaded.model_type,
            "forward": forward.name,
            "forward_reason": forward.conversion.reason,
            "not_replayed": forward.replay_refusal(kv_cache.attention)
            if replay
            else "engine.graph_replay=false",
            "dtype": expected.cached.dtype,
            "compiled_blocks": blocks.num_blocks if (blocks := forward.blocks) else 0,
            "self_test_difference": difference,
            "budget": str(budget),
            "draft": draft.source if draft else None,
        },
        load_counters={
            f"budget.{budget.policy}": 1,
            f"dtype.{expected.cached.dtype}": 1,
            **dtype_resolution.weight_counters(forward.conversion.weights),
            **{f"activations.{k}": size for k, size in forward.conversion.activations.items()},
            "batch_invariant": float(options.batch_invariant),
            "ranks.kv_heads": max(
                (shape.num_kv_heads for shape in expected.cached.attention), default=0
            ),
        },
        name=options.name,
    )


def _create_plugin(options: config.Engine, model_dir: Path) -> InferenceEngine:
    try:
        engine: InferenceEngine = user_classes.create_plugin(
            "engine.name", options.name, ENGINE_METHODS, options, model_dir
        )
    except ValueError as error:
        raise EngineError(str(error)) from error
    mistakes = {"step": _step_mistake, "has_work": _has_work_mistake, "counters": _counters_mistake}
    for method in ENGINE_METHODS:
        where = f"engine.name={options.name}"
        user_classes.guard_method(engine, where, method, mistakes.get(method))
    return engine


def _step_mistake(events: Any) -> str | None:
    if not isinstance(events, list | tuple):
        return f"a list of TokenEvents, not {type(events).__name__}"
    return next(filter(None, map(_event_mistake, events)), None)


def _event_mistake(event: Any) -> str | None:
    """Return what a step's event must be, which the record holds as JSON; None if it is."""
    if not isinstance(event, TokenEvent):
        return f"TokenEvents, not {type(event).__name__}"
    if not isinstance(event.token, int):
        return f"TokenEvents whose token is an int, not {type(event.token).__name__}"
    if event.finish_reason not in FINISH_REASONS:
        known = ", ".join(map(str, FINISH_REASONS))
        return f"TokenEvents whose finish_reason is one of {known}, not {event.finish_reason!r}"
    if not isinstance(event.margin, int | float | None):
        return f"TokenEvents whose margin is a float or None, not {type(event.margin).__name__}"
    return None


def _has_work_mistake(has_work: Any) -> str | None:
    is_bool = isinstance(has_work, bool | np.bool_)
    return None if is_bool else f"a bool, not {type(has_work).__name__}"


def _counters_mistake(counters: Any) -> str | None:
    if not isinstance(counters, Mapping):
        return f"a dict, not {type(counters).__name__}"
    for name, value in counters.items():
        if user_classes.finite_number_mistake(value) is not None:
            return f"a dict of finite numbers, not {value!r} as {name}"
    return None


def _check_preconditions(options: config.Engine) -> None:
    """Check the wired collector and MLX's variables (``EngineError``); set MLX's cache limit."""
    demanded = options.budget.wired_collector
    if demanded is not config.WiredCollector.any:
        machine = find_profile(options.budget.machine)
        reason = wired_advice.collector_mismatch(machine, demanded is config.WiredCollector.enabled)
        hint = "" if machine.wired is not None else "; set engine.budget.machine to a simulated Mac"
        if reason is not None:
            raise EngineError(f"engine.budget.wired_collector={demanded.value}: {reason}{hint}")
    require_mlx_variables(options.mlx)
    if options.mlx_cache_limit is not None:
        import mlx.core as mx

        mx.set_cache_limit(options.mlx_cache_limit)


def require_mlx_variables(mlx: config.Mlx) -> None:
    """Raise ``EngineError`` unless the environment has the MLX variables of ``engine.mlx``."""
    for name, value in mlx.environment().items():
        actual = os.environ.get(name)
        if actual != value:
            raise EngineError(
                f"engine.mlx: {name} is {actual or 'not set'} in this process, not {value}; "
                f"MLX reads it when it is imported: set {name}={value} before Python starts"
            )
