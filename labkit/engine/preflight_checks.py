"""What an arm demands of the machine and of MLX before its engine is built."""

from __future__ import annotations

import os

from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.machine import memory_profile, wired_advice


def check_preconditions(options: config.Engine) -> None:
    """Check the wired collector and MLX's variables, and bound its cache, as the arm says.

    Raises
    ------
    EngineError
        The machine is not as demanded: one line with the command that would make it so.
    """
    require_wired_collector(options.budget)
    require_mlx_variables(options.mlx)
    if options.mlx_cache_limit is not None:
        import mlx.core as mx

        mx.set_cache_limit(options.mlx_cache_limit)


def require_mlx_variables(mlx: config.Mlx) -> None:
    """Raise ``EngineError`` unless MLX's variables are as demanded."""
    for name, value in mlx.environment().items():
        found = os.environ.get(name)
        if found != value:
            raise EngineError(
                f"engine.mlx: {name} is {found or 'not set'} in this process, not {value}; "
                f"MLX reads it when it starts: set {name}={value} before"
            )


def require_wired_collector(budget: config.Budget) -> None:
    """Raise ``EngineError`` unless the wired collector is as demanded."""
    demanded = budget.wired_collector
    if demanded is config.WiredCollector.any:
        return
    machine = memory_profile.find_profile(budget.machine)
    why = wired_advice.collector_mismatch(machine, demanded is config.WiredCollector.enabled)
    if why is None:
        return
    hint = "" if machine.wired is not None else "; engine.budget.machine simulates a Mac's"
    raise EngineError(f"engine.budget.wired_collector={demanded.value}: {why}{hint}")
