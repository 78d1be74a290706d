"""Checks of the machine and of MLX's environment variables, before an engine is created."""

from __future__ import annotations

import os

from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.machine.facts import memory_capacity, wired_advice


def check_preconditions(options: config.Engine) -> None:
    """Check macOS's wired collector and MLX's environment variables; set MLX's cache limit.

    Raises ``EngineError`` if the wired collector or a variable is not as the options demand. The
    message names the remedy.
    """
    require_wired_collector(options.budget)
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


def require_wired_collector(budget: config.Budget) -> None:
    """Raise ``EngineError`` unless the state of the wired collector is what ``budget`` demands."""
    demanded = budget.wired_collector
    if demanded is config.WiredCollector.any:
        return
    machine = memory_capacity.find_profile(budget.machine)
    reason = wired_advice.collector_mismatch(machine, demanded is config.WiredCollector.enabled)
    if reason is None:
        return
    hint = "" if machine.wired is not None else "; set engine.budget.machine to a simulated Mac"
    raise EngineError(f"engine.budget.wired_collector={demanded.value}: {reason}{hint}")
