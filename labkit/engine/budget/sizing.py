"""The pool's size as the worker finds it: exact KV shapes, measured activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import config
from labkit.engine import dtype
from labkit.engine.base import EngineError
from labkit.engine.budget import facts, plan, policy_of
from labkit.engine.budget.base import Decision, Refusal

if TYPE_CHECKING:
    from labkit.engine.kv_layout.kv_cache import LayerShape
    from labkit.machine.memory import Machine

# A profiling forward of more operations than this takes seconds: estimate instead.
MOST_FLOPS = 200e9


def refuse_early(options: config.Engine, model_dir: Path, machine: Machine) -> None:
    """Refuse before the weights are loaded, where config.json tells enough to know.

    Raises
    ------
    EngineError
        The budget is refused: one line that ends in what to set.
    """
    model = facts.of_directory(model_dir, dtype.asked(options))
    answer = None if model is None else plan(options, model, machine)
    if isinstance(answer, Refusal):
        raise EngineError(str(answer))


def size_pool(
    options: config.Engine,
    model_dir: Path,
    machine: Machine,
    shapes: tuple[LayerShape, ...],
    measure: Callable[[], int],
) -> Decision:
    """Size the KV pool of a loaded model.

    Parameters
    ----------
    options
        The engine's part of the config.
    model_dir
        The model's directory.
    machine
        The machine's memory before the model was loaded.
    shapes
        What each layer caches per token.
    measure
        Runs the largest step and returns the bytes of its activations; called where the
        policy subtracts them, or nothing else is known, and the step is cheap.

    Raises
    ------
    EngineError
        The budget is refused: one line that ends in what to set.
    """
    per_token = sum(shape.token_bytes() for shape in shapes)
    kind = dtype.asked(options)
    model = facts.of_directory(model_dir, kind)
    known = model is not None
    model = facts.with_cache(model or facts.of_weights(model_dir, kind), per_token)
    weights = model.weight_bytes / model.float_bytes
    flops = 2 * weights * options.scheduler.max_num_batched_tokens
    profile = not known or (policy_of(options).profiles and flops <= MOST_FLOPS)
    answer = plan(options, model, machine, activations=measure() if profile else None)
    if isinstance(answer, Refusal):
        raise EngineError(str(answer))
    return answer
