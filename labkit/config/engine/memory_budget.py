"""Memory budget: the KV pool's size and the machine that it is computed for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option

# Used for engine.budget.fraction=null; the default of vLLM's gpu_memory_utilization.
DEFAULT_FRACTION = 0.9
DEFAULT_FREE_FRACTION = 0.8  # engine.budget.policy=free_memory
DEFAULT_POOL_BYTES = 1 << 30
# Simulated Macs, for which budgets can be computed on any machine
# (labkit.machine.facts.simulated_macs).
SIMULATED_MAC_NAMES = (
    "sim_m1_8gb",
    "sim_m1_pro_16gb",
    "sim_m2_24gb",
    "sim_m1_pro_32gb",
    "sim_m3_pro_36gb",
    "sim_m4_pro_48gb",
    "sim_m1_max_64gb",
    "sim_m2_max_96gb",
    "sim_m4_max_128gb",
    "sim_m5_max_128gb",
    "sim_m2_ultra_192gb",
    "sim_m3_ultra_512gb",
)


class BudgetPolicy(Enum):
    """Policy that sizes the KV pool (formulas: labkit/engine/memory_budget/budget_policies.py)."""

    fixed = "fixed"
    fraction = "fraction"
    vllm = "vllm"
    mistralrs = "mistralrs"
    llamacpp = "llamacpp"
    tiered_reserve = "tiered_reserve"
    free_memory = "free_memory"


class WiredCollector(Enum):
    """Required state of macOS's wired collector, which labkit checks and never changes."""

    any = "any"
    enabled = "enabled"
    disabled = "disabled"


POLICY = "engine.budget.policy"
# Policies that take a share of some memory.
FRACTION_POLICIES = (
    BudgetPolicy.fraction,
    BudgetPolicy.vllm,
    BudgetPolicy.mistralrs,
    BudgetPolicy.free_memory,
)


@dataclass
class Budget(Group, place="engine.budget"):
    """Memory budget: the policy that sizes the KV pool, and its parameters."""

    policy: BudgetPolicy = option(BudgetPolicy.fixed)
    fraction: float | None = option(
        None,
        "Share of RAM (fraction), of the GPU working set (vllm, mistralrs), or of the memory that "
        "is free after loading (free_memory).",
        gt=0,
        le=1,
        null_means=f"{DEFAULT_FRACTION} (free_memory: {DEFAULT_FREE_FRACTION})",
        read_by=ReadBy(POLICY, FRACTION_POLICIES),
    )
    blocks: int | None = option(
        None,
        "KV blocks of the pool (fixed), or the context size in KV blocks (llamacpp).",
        ge=2,
        unit="KV blocks",
        null_means="the policy's own size",
        read_by=ReadBy(POLICY, (BudgetPolicy.fixed, BudgetPolicy.llamacpp)),
    )
    bytes: int = option(
        DEFAULT_POOL_BYTES,
        "Size of the KV pool if engine.budget.blocks is null.",
        ge=1 << 16,
        unit="bytes",
        read_by=ReadBy(POLICY, (BudgetPolicy.fixed,)),
    )
    machine: str | None = option(
        None,
        "Simulated Mac whose memory the policy divides.",
        choices=SIMULATED_MAC_NAMES,
        null_means="this machine",
        mlx_lm=True,
    )
    wired_collector: WiredCollector = option(WiredCollector.any, mlx_lm=True)
