"""From a config and a model directory to an engine that has passed its self-test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from labkit import config
from labkit.engine import (
    compute_dtype,
    kv_layout,
    load_self_test,
    plugins,
    preflight_checks,
    speculation,
)
from labkit.engine.budget.budget_decision import BudgetDecision
from labkit.engine.budget.pool_sizing import (
    check_before_loading,
    measure_activation_bytes,
    size_pool,
)
from labkit.engine.decode_padding import DecodePadding
from labkit.engine.engine_protocol import Counters, EngineError, InferenceEngine
from labkit.engine.input_builder import InputBuilder
from labkit.engine.kv_layout import KVCache
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.model_runner import ModelRunner
from labkit.engine.parallel.schedule_check import NoScheduleCheck
from labkit.engine.scheduler import Scheduler
from labkit.engine.shared_models import PreparedModel, SharedModels
from labkit.engine.speculation.draft_model import LoadedDraft, load_draft
from labkit.engine.step_launcher import create_launcher
from labkit.engine.step_loop import StepLoop
from labkit.machine import memory_profile

if TYPE_CHECKING:
    from labkit.engine.parallel.mlx_ring import Ring

_METHODS = (
    "submit",
    "abort",
    "step",
    "has_work",
    "counters",
    "reset_counters",
    "clear_cache",
    "close",
)


def create(
    options: config.Engine, model_dir: Path, models: SharedModels | None = None
) -> InferenceEngine:
    """Load a model and build the engine that ``options`` describe.

    A user's own class (``options.name`` is a path) is made with ``(options, model_dir)``.

    Parameters
    ----------
    options
        The engine's part of the config, already checked.
    model_dir
        A directory with config.json and model*.safetensors.
    models
        Those of the engines that this one takes turns with; None: it shares nothing.

    Raises
    ------
    EngineError
        The model or the budget cannot be served, in one line with the reason.
    """
    preflight_checks.check_preconditions(options)
    if config.is_class_path(options.name):
        return _own(options, Path(model_dir))
    if options.name == "mlx_lm":
        from labkit.engine import mlx_lm

        return mlx_lm.create(options, Path(model_dir), models or SharedModels())
    if options.name == "openai":
        from labkit.engine import openai

        return openai.create(options, Path(model_dir))
    if not options.parallel.alone:
        from labkit.engine.parallel import tensor_parallel_engine

        return tensor_parallel_engine.create(options, Path(model_dir))
    return _create_paged(options, Path(model_dir), models or SharedModels(), NoScheduleCheck())


def create_rank(
    options: config.Engine, model_dir: Path, ring: Ring, peers: NoScheduleCheck
) -> LLMEngine:
    """Build one rank's engine, of its share of the model; ``peers`` are the other ranks.

    Raises
    ------
    EngineError
        As ``create``.
    """
    preflight_checks.check_preconditions(options)
    return _create_paged(options, model_dir, SharedModels(ring), peers)


def _create_paged(
    options: config.Engine, model_dir: Path, models: SharedModels, peers: NoScheduleCheck
) -> LLMEngine:
    """Load, test, size the pool, put the parts together."""
    if options.attention.resolver == "identity":
        raise EngineError(
            "engine.attention.resolver=identity: it serves pure decode batches only, and "
            "requests need a prefill; set another resolver"
        )
    kv_layout.create_factory(options)  # refused now, if at all
    machine = memory_profile.find_profile(options.budget.machine)
    check_before_loading(options, model_dir, machine)
    ready = models.prepare(
        model_dir,
        options.kv.block_size,
        options.attention.device,
        dtype=compute_dtype.cast_target(options),
        matrix_storage=compute_dtype.matrix_storage(options),
        # Few shapes, so that each may keep a graph.
        compiled=options.decode_shape is not config.DecodeShape.exact,
    )
    choice, expected = ready.choice, ready.expected
    factory = kv_layout.create_factory(options, expected.dtype)
    small = expected.create_kv_cache(factory)
    kv_dtype = options.kv.dtype.value
    difference = load_self_test.verify(ready.loaded, choice.forward, small, expected, kv_dtype)
    if options.batch_invariant:
        load_self_test.require_batch_invariance(options, choice.forward, factory, expected)

    draft = load_draft(options, model_dir, factory, expected, models)
    shapes = expected.shapes + (draft.shapes if draft else ())
    pool = size_pool(
        options,
        model_dir,
        machine,
        shapes,
        lambda: measure_activation_bytes(
            choice.forward, factory, expected.shapes, options.scheduler
        ),
    )
    kv_cache = factory.create(shapes, pool.blocks)
    return _assemble(options, ready, kv_cache, draft, pool, difference, peers)


def _assemble(
    options: config.Engine,
    ready: PreparedModel,
    kv_cache: KVCache,
    draft: LoadedDraft | None,
    pool: BudgetDecision,
    difference: float,
    peers: NoScheduleCheck,
) -> LLMEngine:
    choice, expected, counters = ready.choice, ready.expected, Counters()
    vocab_size = expected.logits[0].shape[-1]
    run_model = ModelRunner(choice.forward, kv_cache.memory, counters)
    run_draft = ModelRunner(draft.forward, kv_cache.memory, counters) if draft else None
    scheduler = Scheduler(options.scheduler, kv_cache.manager, ready.loaded.eos_token_ids)
    loop = StepLoop(
        options.pipeline,
        scheduler,
        InputBuilder(kv_cache.manager, speculation.segment_layout(options)),
        DecodePadding(options.decode_shape, speculation.max_decode_rows(options), counters),
        create_launcher(options.pipeline, run_model, counters),
        speculation.create(options, kv_cache.manager, run_draft, counters, vocab_size),
        counters,
        peers,
    )
    return LLMEngine(
        scheduler=scheduler,
        cache=kv_cache.manager,
        loop=loop,
        counters=counters,
        vocab_size=vocab_size,
        notes={
            "model_type": ready.loaded.model_type,
            "forward": choice.forward.name,
            "forward_reason": choice.reason,
            "not_replayed": choice.forward.replay_refusal,
            "dtype": expected.dtype,
            "compiled_blocks": blocks.num_blocks if (blocks := choice.forward.blocks) else 0,
            "self_test_difference": difference,
            "budget": str(pool),
            "draft": draft.source if draft else None,
        },
        decided={
            f"budget.{pool.policy}": 1,
            f"dtype.{expected.dtype}": 1,
            **compute_dtype.weight_counters(choice.weight_bytes),
            "batch_invariant": float(options.batch_invariant),
            "ranks.kv_heads": max(shape.num_kv_heads for shape in expected.shapes),
        },
        name=options.name,
    )


def _own(options: config.Engine, model_dir: Path) -> InferenceEngine:
    try:
        own: InferenceEngine = plugins.create_plugin(
            "engine.name", options.name, _METHODS, options, model_dir
        )
    except ValueError as error:
        raise EngineError(str(error)) from error
    return own
