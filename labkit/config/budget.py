"""The KV pool's size, and the machine that it is computed for."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.choices import BudgetPolicy, WiredCollector
from labkit.config.rules import require

# What a policy that reads engine.budget.fraction takes where it is null, as vLLM does.
DEFAULT_FRACTION = 0.9
DEFAULT_POOL_BYTES = 1 << 30
# The Macs that budgets can be computed for anywhere (labkit.machine.memory).
MACHINES = (
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


@dataclass
class Budget:
    """The KV pool's size: a policy and what it reads.

    ``blocks``: fixed, and llamacpp's token capacity. ``bytes``: fixed, where blocks is
    null. ``fraction``: of RAM (fraction), of the working set (vllm, mistralrs); null: 0.9.
    ``machine``: a simulated Mac's memory; null: this machine's. ``wired_collector``: what
    the machine's must be, else the arm is refused; labkit never changes it.
    """

    policy: BudgetPolicy = BudgetPolicy.fixed
    fraction: float | None = None
    blocks: int | None = None
    bytes: int = DEFAULT_POOL_BYTES
    machine: str | None = None
    wired_collector: WiredCollector = WiredCollector.any

    def __post_init__(self) -> None:
        """Check the ranges and that nothing is set that the policy does not read."""
        require(
            self.blocks is None or self.blocks >= 2,
            f"engine.budget.blocks={self.blocks}: allowed are 2 or more, or null",
        )
        require(
            self.bytes >= 1 << 16,
            f"engine.budget.bytes={self.bytes}: allowed are 65536 or more",
        )
        require(
            self.fraction is None or 0 < self.fraction <= 1,
            f"engine.budget.fraction={self.fraction}: allowed are above 0, at most 1, or null",
        )
        require(
            self.machine is None or self.machine in MACHINES,
            f"engine.budget.machine={self.machine}: allowed are {', '.join(MACHINES)}, or null "
            "for this machine",
        )
        shares = (BudgetPolicy.fraction, BudgetPolicy.vllm, BudgetPolicy.mistralrs)
        self._unread("fraction", self.fraction, None, shares)
        self._unread("blocks", self.blocks, None, (BudgetPolicy.fixed, BudgetPolicy.llamacpp))
        self._unread("bytes", self.bytes, DEFAULT_POOL_BYTES, (BudgetPolicy.fixed,))

    def _unread(
        self, name: str, value: object, default: object, readers: tuple[BudgetPolicy, ...]
    ) -> None:
        require(
            value == default or self.policy in readers,
            f"engine.budget.{name}={value}: engine.budget.policy={self.policy.value} does not "
            f"read it; it is for {', '.join(policy.value for policy in readers)}",
        )
