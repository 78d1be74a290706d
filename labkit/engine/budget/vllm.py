"""``vllm``: profile and claim a share of the device's memory."""

from __future__ import annotations

from labkit.engine.budget.base import Asked, Decision, Refusal
from labkit.engine.budget.share import Share


class Vllm:
    """``kv = device_memory * utilization - weights - profile_peak``.

    Device memory is the GPU's own on CUDA; here it is what the device may hold, Metal's
    recommended working set (without Metal, RAM), as in vllm-metal's released cache policy.
    Refused where the target is not free: nothing smaller is tried. Utilization is
    ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, vLLM.
    """

    name = "vllm"
    profiles = True

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        machine = asked.machine
        of = "Metal's working set" if machine.metal else "RAM"
        free = min(machine.available, machine.hint)
        return Share(self.name, machine.hint, of, free=free, step=True).decide(asked)
