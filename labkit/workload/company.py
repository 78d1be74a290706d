"""Which request arms can take turns in one process, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.config import BudgetPolicy, Engine, Pipeline, is_class_path, to_plain


def apart(engines: Sequence[Engine]) -> str | None:
    """Say in one line why arms with these engines cannot share a process; None: they can."""
    reasons = (reason for rule in RULES if (reason := rule(engines)) is not None)
    return next(reasons, None)


def _same(option: str, read: Callable[[Engine], Any], why: str) -> Rule:
    """Return the rule that an option is the same in all arms."""

    def rule(engines: Sequence[Engine]) -> str | None:
        found = sorted({str(to_plain(read(engine))) for engine in engines})
        return f"engine.{option} is {' and '.join(found)}: {why}" if len(found) > 1 else None

    return rule


def _unset(option: str, read: Callable[[Engine], Any], why: str) -> Rule:
    """Return the rule that an option is null in all arms."""

    def rule(engines: Sequence[Engine]) -> str | None:
        found = next((v for engine in engines if (v := read(engine)) is not None), None)
        return None if found is None else f"engine.{option}={found}: {why}"

    return rule


def _no_overlap(engines: Sequence[Engine]) -> str | None:
    if all(engine.pipeline is not Pipeline.overlap for engine in engines):
        return None
    return (
        "engine.pipeline=overlap: a step is in flight between two calls; it would run in the "
        "others' turns, and waiting for it at the end of every turn would cost the arm what "
        "it overlaps"
    )


def _own_engine(engines: Sequence[Engine]) -> str | None:
    own = next((engine.name for engine in engines if is_class_path(engine.name)), None)
    if own is None:
        return None
    return f"engine.name={own}: nobody knows what it does between its steps"


def _live_budget(engines: Sequence[Engine]) -> str | None:
    """Refuse pools sized by the memory that is free, which the arms loaded before have taken."""
    for engine in engines:
        budget = engine.budget
        if budget.policy is not BudgetPolicy.fixed and budget.machine is None:
            return (
                f"engine.budget.policy={budget.policy.value}: it reads what memory is free, and "
                "arms that are loaded before have taken some"
            )
    return None


Rule = Callable[[Sequence[Engine]], str | None]

RULES: tuple[Rule, ...] = (
    _same("blas", lambda e: e.blas.value, "a process has one, loaded before MLX"),
    _unset("memory_limit", lambda e: e.memory_limit, "it holds a whole process"),
    _unset("mlx_cache_limit", lambda e: e.mlx_cache_limit, "MLX has one cache in a process"),
    _same(
        "budget.wired_collector",
        lambda e: e.budget.wired_collector.value,
        "a machine has one, and it is changed between two runs",
    ),
    _live_budget,
    _no_overlap,
    _own_engine,
)
