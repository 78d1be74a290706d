"""What each policy would give a model on a machine, before weights, in one line each."""

from __future__ import annotations

from dataclasses import dataclass

from labkit import config
from labkit.engine import budget
from labkit.engine.budget import BudgetRefusal, ModelFootprint
from labkit.machine.memory_profile import MemoryProfile

# A model without weights or activations: what is left is the policy's own ceiling.
WEIGHTLESS = ModelFootprint("none", 0, 1 << 10, 0, 0, 4096)
SHARES = (
    config.BudgetPolicy.fraction,
    config.BudgetPolicy.vllm,
    config.BudgetPolicy.mistralrs,
)


@dataclass(frozen=True)
class Ceiling:
    """A policy's ceiling (bytes), or None and what to set instead."""

    policy: str
    bytes: int | None
    advice: str = ""


def ceilings(machine: MemoryProfile, fraction: float | None) -> list[Ceiling]:
    """Ask every policy but ``fixed``, which has no ceiling of its own."""
    found = []
    for policy in config.BudgetPolicy:
        if policy is config.BudgetPolicy.fixed:
            continue
        share = fraction if policy in SHARES else None
        engine = config.Engine(budget=config.Budget(policy=policy, fraction=share))
        answer = budget.plan(engine, WEIGHTLESS, machine)
        if isinstance(answer, BudgetRefusal):
            advice = str(answer).rsplit("; ", 1)[1]
            found.append(Ceiling(policy.value, None, advice))
        else:
            found.append(Ceiling(policy.value, answer.ceiling))
    return found
