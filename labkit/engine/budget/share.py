"""A share of a ceiling: what the policies that read ``engine.budget.fraction`` have in common."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.engine.budget.amounts import fraction_down, fraction_up, size
from labkit.engine.budget.base import (
    LEAST_BLOCKS,
    Asked,
    Decision,
    Part,
    Refusal,
    decision,
    nothing_fits,
)


@dataclass(frozen=True)
class Share:
    """``pool = base * fraction - used``, refused where it is too small or not free.

    Parameters
    ----------
    policy
        The policy's name.
    base
        What the fraction is of (bytes).
    of
        What ``base`` is, in words.
    free
        What may be claimed at most (bytes); None: the policy does not look.
    step
        Whether the activations are part of ``used``.
    """

    policy: str
    base: int
    of: str
    free: int | None
    step: bool

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        claim = int(self.base * asked.fraction)
        blocks = (claim - self._used(asked)) // asked.block_bytes
        if blocks < LEAST_BLOCKS or (self.free is not None and claim > self.free):
            return self._refuse(asked, claim, blocks)
        return decision(asked, policy=self.policy, ceiling=claim, blocks=blocks, step=self.step)

    def _used(self, asked: Asked) -> int:
        return asked.weights.bytes + (asked.step.bytes if self.step else 0)

    def _refuse(self, asked: Asked, claim: int, blocks: int) -> Refusal:
        need = self._used(asked) + LEAST_BLOCKS * asked.block_bytes
        most = self.base if self.free is None else min(self.base, self.free - asked.machine.slack)
        # A byte more than needed, as the claim is rounded down to whole bytes.
        low, high = (need + 1) / self.base, most / self.base
        small = blocks < LEAST_BLOCKS
        fits = fraction_up(low, high) if small else fraction_down(low, high)
        pool = Part(f"{LEAST_BLOCKS} KV blocks at least", LEAST_BLOCKS * asked.block_bytes)
        if not small:
            pool = asked.pool(blocks)
        used = (asked.weights, asked.step) if self.step else (asked.weights,)
        return Refusal(
            option=f"engine.budget.fraction={asked.fraction:g}",
            asked=f"policy {self.policy} asks for {size(claim)} of {size(self.base)} {self.of}",
            free=self._free_words(asked),
            parts=(*used, pool),
            settings=() if fits is None else (("engine.budget.fraction", fits),),
            direction="or more" if small else "or less",
            otherwise=nothing_fits(max(1, need - most), asked.machine) if fits is None else "",
        )

    def _free_words(self, asked: Asked) -> str:
        free = asked.machine.available if self.free is None else self.free
        return f"free are {size(free)} on {asked.machine.name}"
