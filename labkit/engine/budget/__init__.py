"""Memory budgets: how large the KV pool may be, decided before anything is loaded.

Imports neither MLX nor numba, so that the parent process can plan with it.
"""

from __future__ import annotations

from labkit import config
from labkit.engine import compute_dtype
from labkit.engine.budget import model_footprint
from labkit.engine.budget.budget_decision import (
    BudgetDecision,
    BudgetRefusal,
    MemoryPart,
    PolicyInputs,
    apply_ceiling,
)
from labkit.engine.budget.budget_policies import POLICIES
from labkit.engine.budget.model_footprint import ModelFootprint
from labkit.machine import memory_profile
from labkit.machine.memory_profile import MemoryProfile

__all__ = [
    "BudgetDecision",
    "BudgetRefusal",
    "MemoryPart",
    "ModelFootprint",
    "check",
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
    """Size the KV pool, or say why there can be none. Pure, but for reading the machine.

    ``machine``: by default the one that ``engine.budget.machine`` names, else this one, now.
    ``activations``: bytes of the largest step, where measured; by default estimated.
    """
    if activations is None:
        scheduler = engine.scheduler
        activations = model.activation_bytes(scheduler.most_step_tokens, scheduler.max_num_seqs)
    if machine is None:
        machine = memory_profile.find_profile(engine.budget.machine)
    model = model_footprint.with_kv_bytes(model, kv_bytes_per_token(engine, model))
    asked = PolicyInputs(engine.budget, engine.kv.block_size, model, machine, activations)
    return apply_ceiling(asked, POLICIES[engine.budget.policy](asked))


def kv_bytes_per_token(engine: config.Engine, model: ModelFootprint) -> int:
    """Return the bytes of a token's keys and values, in the type that the engine keeps them in."""
    width = compute_dtype.kv_itemsize(engine, model.float_bytes)
    return width * model.kv_bytes_per_token // model_footprint.FLOAT32_BYTES


def check(experiment: config.Experiment) -> BudgetDecision | None:
    """Plan an arm's pool before anything runs.

    Returns None where the arm has no pool (nothing is served, engine=mlx_lm or openai) or its
    model does not tell enough; the worker then decides.

    Raises
    ------
    ConfigError
        The budget is refused: one line that ends in what to set.
    """
    if not experiment.workload.serves:
        return None
    if experiment.engine.name in config.ELSEWHERE:
        return None
    engine = experiment.engine
    model = model_footprint.from_model(
        experiment.model, compute_dtype.cast_target(engine), compute_dtype.matrix_storage(engine)
    )
    if model is None:
        return None
    answer = plan(engine, model)
    if isinstance(answer, BudgetRefusal):
        raise config.ConfigError(str(answer))
    return answer
