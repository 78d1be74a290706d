"""What an arm demands of the machine and of MLX before its engine is built."""

from __future__ import annotations

from labkit import config
from labkit.engine.base import EngineError
from labkit.platform import memory_machine, memory_wired


def settle(options: config.Engine) -> None:
    """Check the wired collector and bound MLX's cache of freed buffers, as the arm says.

    Raises
    ------
    EngineError
        The machine is not as demanded: one line with the command that would make it so.
    """
    require_wired(options.budget)
    if options.mlx_cache_limit is not None:
        import mlx.core as mx

        mx.set_cache_limit(options.mlx_cache_limit)


def require_wired(budget: config.Budget) -> None:
    """Raise ``EngineError`` unless the wired collector is as demanded."""
    demanded = budget.wired_collector
    if demanded is config.WiredCollector.any:
        return
    machine = memory_machine.find(budget.machine)
    why = memory_wired.mismatch(machine, demanded is config.WiredCollector.enabled)
    if why is None:
        return
    hint = "" if machine.wired is not None else "; engine.budget.machine simulates a Mac's"
    raise EngineError(f"engine.budget.wired_collector={demanded.value}: {why}{hint}")
