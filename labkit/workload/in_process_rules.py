"""In-process rules: whether the arms of a cell can share a process.

A process has only one BLAS, one memory limit and one value of each MLX setting. If the arms differ
in one of these, every arm of the cell runs in a process of its own. These processes are alive at
the same time and take turns, unless the arms differ in a setting of the whole machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from labkit.config import BudgetPolicy, Engine, Experiment, Mlx, Pipeline, is_class_path, to_plain
from labkit.machine import worker_environment
from labkit.machine.processes.listening_processes import NoListener, find_listeners

Rule = Callable[[Sequence[Engine]], str | None]


def first_reason(rules: Sequence[Rule], experiments: Sequence[Experiment]) -> str | None:
    """Return the first reason that ``rules`` give against the arms' engines, or None."""
    engines = [experiment.engine for experiment in experiments]
    return next((reason for rule in rules if (reason := rule(engines)) is not None), None)


def _same(option: str, read: Callable[[Engine], Any], why: str) -> Rule:
    """Return the rule that ``option`` must have the same value in all arms."""

    def rule(engines: Sequence[Engine]) -> str | None:
        values = sorted({str(to_plain(read(engine))) for engine in engines})
        both = " in one arm and ".join(values[:2])
        return f"engine.{option} is {both} in another: {why}" if len(values) > 1 else None

    return rule


def _no(matches: Callable[[Engine], bool], reason: Callable[[Engine], str]) -> Rule:
    """Return the rule that no engine matches. ``reason`` describes the first that does."""

    def rule(engines: Sequence[Engine]) -> str | None:
        return next((reason(engine) for engine in engines if matches(engine)), None)

    return rule


def _unset(option: str, why: str) -> Rule:
    """Return the rule that ``option`` must be null in all arms."""
    read = attrgetter(option)
    return _no(lambda e: read(e) is not None, lambda e: f"engine.{option}={read(e)}: {why}")


def _one_pool(engines: Sequence[Engine]) -> str | None:
    """Return the reason that mlx_lm cannot share a process with other engines, or None.

    The threads of MLX and its BLAS would compete with the kernels' threads for the cores. On two
    cores (``workload=uniform``, four requests) the paged engine took 1.1 to 1.4 times as long as
    beside another paged engine, even with one BLAS thread and no step of mlx_lm in flight, and 1.4
    to 1.7 times with two. On a Mac mlx_lm also raises Metal's wired limit, which the whole process
    shares.
    """
    if len({engine.name == "mlx_lm" for engine in engines}) == 1:
        return None
    return (
        "engine=mlx_lm: in one process the threads of MLX and its BLAS compete with the other "
        "arms' kernels, which then took 1.1 to 1.7 times as long"
    )


def _ranks(engines: Sequence[Engine]) -> str | None:
    size = max(engine.parallel.size for engine in engines)
    if size == 1:
        return None
    return (
        f"engine.parallel.size={size}: its ranks are separate processes that would use memory and "
        "threads during the other arms' turns"
    )


# Pools that are neither of a fixed size nor planned for a simulated machine.
live_budget = _no(
    lambda e: e.budget.policy is not BudgetPolicy.fixed and e.budget.machine is None,
    lambda e: (
        f"engine.budget.policy={e.budget.policy.value} sizes the pool by the free memory, "
        "which depends on the arms that were loaded before"
    ),
)


def _kept_servers(engines: Sequence[Engine]) -> str | None:
    """Return the reason that a server at ``engine.server.url`` cannot be paused, or None.

    labkit did not start such a server. It may stop the server during the turns of other arms if
    ``engine.server.pause`` is set and no other arm uses the same server.
    """
    servers = [engine.server for engine in engines if engine.server.url is not None]
    used: set[int] = set()
    for server in servers:
        option = f"engine.server.url={server.url}"
        if not server.pause:
            return (
                f"{option}: labkit did not start it; set engine.server.pause=true to let labkit "
                "stop it during the turns of the other arms"
            )
        try:
            listeners = find_listeners(str(server.url))
        except NoListener as error:
            return f"{option} with engine.server.pause=true: {error}"
        if used.intersection(listeners):
            return (
                f"{option}: two arms (the control arm too) would use this server, which would "
                "compute the requests of one in the turns of the other"
            )
        used.update(listeners)
    return None


# The rules for kernels of arms that take turns in processes of their own.
OF_A_MACHINE: tuple[Rule, ...] = (
    _same(
        "budget.wired_collector",
        lambda e: e.budget.wired_collector.value,
        "a machine has only one setting, which changes between runs",
    ),
)
# The rules for engines that take turns in processes of their own.
LIVE_REQUESTS = (*OF_A_MACHINE, _kept_servers)
# The rules for kernels of arms in one process.
OF_A_PROCESS: tuple[Rule, ...] = (
    _same("blas", lambda e: e.blas.value, "a process has only one, loaded before MLX"),
    _unset("memory_limit", "it limits the whole process"),
    _unset("mlx_cache_limit", "MLX has only one cache per process"),
    *OF_A_MACHINE,
    *(
        _same(name, attrgetter(name), "MLX reads it once per process, at start")
        for name in (f"mlx.{item.name}" for item in dataclasses.fields(Mlx))
    ),
)
# The rules for engines that serve in one process.
REQUESTS: tuple[Rule, ...] = (
    *OF_A_PROCESS,
    _no(
        lambda e: e.name == "openai",
        lambda e: (
            "engine=openai: a server is a separate process that would compute during other "
            "arms' turns"
        ),
    ),
    _one_pool,
    _same(
        "threads (of BLAS)",
        lambda e: worker_environment.blas_threads(e.name, e.threads),
        "OpenBLAS has only one thread pool per process",
    ),
    _ranks,
    live_budget,
    _no(
        lambda e: e.pipeline is Pipeline.overlap,
        lambda e: (
            "engine.pipeline=overlap: a step stays in flight between two calls and would run "
            "during the other arms' turns; waiting for it at the end of every turn would undo the "
            "overlap"
        ),
    ),
    _no(
        lambda e: is_class_path(e.name),
        lambda e: f"engine.name={e.name}: a user's engine may also work during other arms' turns",
    ),
)
