"""The memory that each budget policy would give an engine on a machine, weights included."""

from __future__ import annotations

from dataclasses import dataclass

from labkit import config
from labkit.engine import memory_budget
from labkit.engine.memory_budget import BudgetRefusal, ModelFootprint
from labkit.machine.facts.memory_capacity import MemoryProfile

# For a model without weights or activations the budget is the policy's own ceiling.
WEIGHTLESS_MODEL = ModelFootprint("none", 0, 1 << 10, 0, 0, 4096)


@dataclass(frozen=True)
class BudgetCeiling:
    """The most memory that a policy would give an engine, in bytes.

    ``bytes`` is None if the policy refuses this machine; ``advice`` then says what to set.
    """

    policy: str
    bytes: int | None
    advice: str = ""


def budget_ceilings(machine: MemoryProfile, fraction: float | None) -> list[BudgetCeiling]:
    """Return the ceiling of every policy except ``fixed``, whose size the user sets.

    ``fraction`` replaces the default fraction of the policies that have one.
    """
    ceilings = []
    for policy in config.BudgetPolicy:
        if policy is config.BudgetPolicy.fixed:
            continue
        share = fraction if policy in config.FRACTION_POLICIES else None
        engine = config.Engine(budget=config.Budget(policy=policy, fraction=share))
        decision = memory_budget.plan(engine, WEIGHTLESS_MODEL, machine)
        if isinstance(decision, BudgetRefusal):
            advice = str(decision).rsplit("; ", 1)[1]
            ceilings.append(BudgetCeiling(policy.value, None, advice))
        else:
            ceilings.append(BudgetCeiling(policy.value, decision.ceiling))
    return ceilings
