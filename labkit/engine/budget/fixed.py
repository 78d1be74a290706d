"""``fixed``: so many blocks, or so many bytes."""

from __future__ import annotations

from labkit.engine.budget.amounts import size
from labkit.engine.budget.base import Asked, Decision, Part, Refusal, decision, nothing_fits

LEAST = 2  # the null block and one that a token can lie in


class Fixed:
    """``kv = engine.budget.blocks``, else ``engine.budget.bytes`` in whole blocks.

    The number is the user's: it is refused only where weights, activations and pool
    together are more than the machine has at all, or where two blocks are more than the
    bytes.
    """

    name = "fixed"
    profiles = False

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        given = asked.budget.blocks
        blocks = asked.budget.bytes // asked.block_bytes if given is None else given
        total = asked.machine.total
        used = asked.weights.bytes + asked.step.bytes
        fits = (total - used) // asked.block_bytes
        if LEAST <= blocks <= fits:
            return decision(asked, policy=self.name, ceiling=total, blocks=blocks, step=True)
        pool = asked.pool(blocks)
        small = blocks < LEAST
        if small:
            pool = Part("two KV blocks", LEAST * asked.block_bytes)
        right = LEAST if small else fits
        key, value = "engine.budget.blocks", right
        option = f"{key}={given}"
        if given is None:
            key, value = "engine.budget.bytes", right * asked.block_bytes
            option = f"{key}={asked.budget.bytes}"
        return Refusal(
            option=option,
            asked="two KV blocks are the least" if small else f"asks for {size(pool.bytes)}",
            free=f"free are {size(asked.machine.available)} of {size(total)} on "
            f"{asked.machine.name}",
            parts=(asked.weights, asked.step, pool),
            settings=((key, value),) if fits >= LEAST else (),
            direction="or more" if small else "or less",
            otherwise=""
            if fits >= LEAST
            else nothing_fits(used + LEAST * asked.block_bytes - total, asked.machine),
        )
