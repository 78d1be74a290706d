"""Which arms can share a process and take turns in it, and why the others can't.

Arms that differ in what a process has one of (a BLAS, a limit of its memory, a setting of
MLX) stay in processes of their own, all arms of that cell then.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import ConfigError, Design, Experiment, Isolation


def apart(experiments: Sequence[Experiment]) -> str | None:
    """Say in one line why these arms cannot share a process; None: they can."""
    from labkit import workload

    engines = [experiment.engine for experiment in experiments]
    if any(engine.memory_limit is not None for engine in engines):
        return "engine.memory_limit holds a process, and an arm has one"
    for name in ("blas", "mlx_cache_limit"):
        if any(getattr(engine, name) != getattr(engines[0], name) for engine in engines):
            return f"the arms differ in engine.{name}, of which a process has one"
    if any(engine.budget != engines[0].budget for engine in engines):
        return "the arms differ in engine.budget, and a process has one memory to divide"
    return workload.apart(experiments)


def settle(design: Design, experiments: Sequence[Experiment]) -> tuple[Isolation, str | None]:
    """Decide where the runs of these arms happen, and say why they are apart if they are.

    Raises
    ------
    ConfigError
        ``in_process`` was asked for and cannot be.
    """
    if design.isolation is Isolation.process:
        return Isolation.process, "design.isolation=process asks for it"
    reason = apart(experiments)
    if reason is None:
        return Isolation.in_process, None
    if design.isolation is Isolation.in_process:
        raise ConfigError(
            f"design.isolation=in_process: {reason}; set design.isolation=process, or leave auto"
        )
    return Isolation.process, reason
