"""``fraction``: a share of system RAM, as proposed for vllm-metal's paged path."""

from __future__ import annotations

from labkit.engine.budget.base import Asked, Decision, Refusal
from labkit.engine.budget.share import Share


class Fraction:
    """``kv = system_ram * fraction - weights - profile_peak``.

    Refused where ``system_ram * fraction`` is more than is free now, so that a desktop
    that shares its memory is told which fraction it has left.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Proposal, path 2 (``VLLM_METAL_MEMORY_FRACTION``).
    """

    name = "fraction"
    profiles = True

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        machine = asked.machine
        share = Share(self.name, machine.total, "RAM", free=machine.available, step=True)
        return share.decide(asked)
