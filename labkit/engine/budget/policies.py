"""The published policies, one class each: how large a KV pool may be.

Sources are named in the classes: "Rethinking vllm-metal's Memory Budget for Apple Silicon"
(14 February 2026) compares them.
"""

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

GIB = 1 << 30
LEAST = 2  # the null block and one that a token can lie in
SMALL_MACHINE = 36 * GIB
LEAST_HEADROOM = 512 << 20
# RAM up to (GiB): reserve (GiB).
TIERS = ((16, 4), (64, 6), (128, 8))
LARGEST = 12


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


class MistralRs:
    """``kv = min(memory_hint, ram_cap) * utilization - used``.

    ``ram_cap`` is 2/3 of RAM up to 36 GiB and 3/4 above. Weights come first, in what is
    left of ``memory_hint - allocated`` (nothing is allocated before) after a headroom of
    2 %, at least 512 MiB; mistral.rs would leave the layers that do not fit on the CPU,
    labkit refuses. ``used`` is the weights: activations are not profiled. What others
    hold is not looked at. Utilization is ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, mistral.rs.
    """

    name = "mistralrs"
    profiles = False

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        hint = asked.machine.hint
        headroom = max(hint // 50, LEAST_HEADROOM)
        if asked.weights.bytes > hint - headroom:
            return Refusal(
                option="engine.budget.policy=mistralrs",
                asked=f"the weights must fit in {size(hint)} less a headroom of {size(headroom)}",
                free=f"free are {size(asked.machine.available)} on {asked.machine.name}",
                parts=(asked.weights,),
                otherwise=nothing_fits(asked.weights.bytes - hint + headroom, asked.machine),
            )
        ceiling = min(hint, ram_cap(asked.machine.total))
        of = "of working set and RAM cap, the smaller"
        return Share(self.name, ceiling, of, free=None, step=False).decide(asked)


def ram_cap(total: int) -> int:
    """Return the most (bytes) that a machine with ``total`` bytes of RAM gives to a model."""
    return total * 2 // 3 if total <= SMALL_MACHINE else total * 3 // 4


class LlamaCpp:
    """``kv = layers * 2 * kv_heads * head_dim * n_ctx * bytes``, all of it at start.

    ``n_ctx`` is ``engine.budget.blocks`` (the null block aside) times the block size; by
    default the context that the model was trained for. Weights, KV and the compute
    buffer must fit in ``memory_hint - allocated`` (nothing is allocated before). No RAM
    cap, no utilization, and what others hold is not looked at.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, llama.cpp.
    """

    name = "llamacpp"
    profiles = True

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        blocks = asked.budget.blocks
        option = f"engine.budget.blocks={blocks}"
        if blocks is None:
            context = asked.model.max_context
            option = f"engine.budget.policy=llamacpp (n_ctx={context}, the model's own)"
            blocks = 0 if context is None else -(-context // asked.block_size) + 1
        hint = asked.machine.hint
        fits = (hint - asked.weights.bytes - asked.step.bytes) // asked.block_bytes
        if 2 <= blocks <= fits:
            return decision(asked, policy=self.name, ceiling=hint, blocks=blocks, step=True)
        of = "Metal's working set" if asked.machine.metal else "RAM"
        need = asked.weights.bytes + asked.step.bytes + max(blocks, 2) * asked.block_bytes
        return Refusal(
            option=option,
            asked=f"policy llamacpp asks for {size(need)} of {size(hint)} {of}"
            if blocks
            else "config.json does not say which context the model was trained for",
            free=f"free are {size(asked.machine.available)} on {asked.machine.name}",
            parts=(asked.weights, asked.step, asked.pool(blocks)),
            settings=(("engine.budget.blocks", fits),) if fits >= 2 else (),
            direction="or less",
            otherwise="" if fits >= 2 else nothing_fits(need - hint, asked.machine),
        )


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
