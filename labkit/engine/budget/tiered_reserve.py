"""``tiered_reserve``: all of RAM but a reserve that grows with the machine."""

from __future__ import annotations

from labkit.engine.budget.amounts import size
from labkit.engine.budget.base import (
    LEAST_BLOCKS,
    Asked,
    Decision,
    Refusal,
    decision,
    nothing_fits,
)

GIB = 1 << 30
# RAM up to (GiB): reserve (GiB).
TIERS = ((16, 4), (64, 6), (128, 8))
LARGEST = 12


class TieredReserve:
    """``kv = system_ram - reserve - weights - profile_peak``.

    The reserve for macOS and other programs is 4 GiB up to 16 GiB of RAM, 6 up to 64,
    8 up to 128 and 12 above. It has no setting.

    Source: a first form of "Rethinking vllm-metal's Memory Budget for Apple Silicon"
    (14 February 2026).
    """

    name = "tiered_reserve"
    profiles = True

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        held = reserve(asked.machine.total)
        ceiling = max(0, asked.machine.total - held)
        used = asked.weights.bytes + asked.step.bytes
        blocks = (ceiling - used) // asked.block_bytes
        if blocks >= LEAST_BLOCKS:
            return decision(asked, policy=self.name, ceiling=ceiling, blocks=blocks, step=True)
        least = asked.pool(LEAST_BLOCKS)
        fixed = used + least.bytes <= asked.machine.total
        settings = (("engine.budget.policy", "fixed"), ("engine.budget.blocks", LEAST_BLOCKS))
        return Refusal(
            option="engine.budget.policy=tiered_reserve",
            asked=f"it leaves {size(ceiling)} of {size(asked.machine.total)} RAM after a reserve "
            f"of {size(held)}",
            free=f"free are {size(asked.machine.available)} on {asked.machine.name}",
            parts=(asked.weights, asked.step, least),
            settings=settings if fixed else (),
            otherwise=""
            if fixed
            else nothing_fits(used + least.bytes - asked.machine.total, asked.machine),
        )


def reserve(total: int) -> int:
    """Return the bytes kept from the engine on a machine with ``total`` bytes of RAM."""
    return next((held for most, held in TIERS if total <= most * GIB), LARGEST) * GIB
