"""Memory budgets: the size of the KV pool, decided before any weights are loaded.

The package imports neither MLX nor numba, so the parent process can plan with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from labkit import config
from labkit.engine.memory_budget import model_footprint, required_kv_slots
from labkit.engine.memory_budget.budget_decision import (
    BudgetDecision,
    BudgetRefusal,
    MemoryPart,
    PolicyInputs,
    apply_ceiling,
)
from labkit.engine.memory_budget.budget_policies import POLICIES
from labkit.engine.memory_budget.model_footprint import ModelFootprint
from labkit.engine.model.dtype_resolution import WeightLoading, kv_bits
from labkit.machine.facts.memory_capacity import MemoryProfile
from labkit.machine.facts.simulated_macs import find_profile

__all__ = [
    "BudgetDecision",
    "BudgetRefusal",
    "MemoryPart",
    "ModelFootprint",
    "footprint",
    "kv_bytes_per_token",
    "plan",
]


def plan(
    engine: config.Engine,
    model: ModelFootprint,
    machine: MemoryProfile | None = None,
    *,
    activations: int | None = None,
) -> BudgetDecision | BudgetRefusal:
    """Size the KV pool by the configured policy, or return the policy's refusal.

    The only side effect is reading the machine's memory, and only if ``machine`` is None.

    ``engine``: the engine's options; ``engine.budget`` names the policy and its settings.
    ``model``: the model's sizes. ``machine``: the memory to plan for. None: the machine that
    ``engine.budget.machine`` names, or this computer as it is now. ``activations``: measured bytes
    of the largest step's activations. None: they are estimated.
    """
    if activations is None:
        tokens = engine.scheduler.max_step_tokens
        activations = model.activation_bytes(tokens, engine.max_decode_rows)
    if machine is None:
        machine = find_profile(engine.budget.machine)
    model = replace(model, kv_bytes_per_token=kv_bytes_per_token(engine, model))
    inputs = PolicyInputs(engine, model, machine, activations)
    result = apply_ceiling(inputs, POLICIES[engine.budget.policy](inputs))
    if not engine.kv.window_pools or isinstance(result, BudgetRefusal):
        return result
    windows, blocks = model.windows, result.blocks
    full = None if windows is None else required_kv_slots.full_blocks(engine, windows, blocks)
    return replace(result, full_blocks=full)


def footprint(engine: config.Engine, source: config.Model | Path) -> ModelFootprint | None:
    """Return the sizes of a model, and of its draft model, to plan with before loading.

    ``source``: the configured model, or its directory. Returns None if config.json does not tell a
    size that a plan needs.
    """
    drafts, other = engine.drafts, engine.drafts.draft_path
    model = _sizes(engine, source)
    if model is not None and engine.speculation is config.Speculation.draft:
        draft = _sizes(engine, Path(other) if other else source, drafts.draft_layers)
        model = None if draft is None else model_footprint.with_draft(model, draft)
    return model if model is not None and model.is_cache_known else None


def _sizes(
    engine: config.Engine, source: config.Model | Path, layers: int | None = None
) -> ModelFootprint | None:
    loading = WeightLoading.of(engine, layers)
    if isinstance(source, Path):
        return model_footprint.from_directory(source, loading)
    return model_footprint.from_model(source, loading)


def kv_bytes_per_token(engine: config.Engine, model: ModelFootprint) -> int:
    """Return the bytes of one token's keys and values in all layers, in the engine's KV dtype."""
    bits = kv_bits(engine, model.float_bytes)
    return bits * model.kv_bytes_per_token // (8 * model_footprint.FLOAT32_BYTES)


def plan_for_arm(experiment: config.Experiment) -> BudgetDecision | None:
    """Size an arm's KV pool before anything runs.

    Returns None if labkit manages no pool (a kernel workload, engine=mlx_lm, engine=openai, a class
    of the user's own). Also returns None if the model's config.json does not tell sizes that the
    plan needs; the worker then sizes the pool after loading the model. Raises ``ConfigError`` if
    the policy refuses the budget. The message is one line that ends in the setting to change.
    """
    if not experiment.workload.serves or experiment.engine.name not in config.PRESET_LAYOUTS:
        return None
    model = footprint(experiment.engine, experiment.model)
    result = None if model is None else plan(experiment.engine, model)
    if isinstance(result, BudgetRefusal):
        raise config.ConfigError(str(result))
    return result
