"""The published policies, a function each: what may a KV pool take, beside weights and activations?

A policy is pure: the same question has the same ceiling. Sources are named in the functions:
"Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026) compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from labkit.config import BudgetPolicy
from labkit.engine.budget.budget_decision import (
    MIN_AUTO_BLOCKS,
    MIN_EXPLICIT_BLOCKS,
    BudgetRefusal,
    MemoryCeiling,
    MemoryPart,
    PolicyInputs,
    Setting,
    format_bytes,
    make_refusal,
)
from labkit.machine.memory_profile import MemoryProfile

GIB = 1 << 30
SMALL_MACHINE_BYTES = 36 * GIB
MIN_HEADROOM_BYTES = 512 << 20
# RAM up to (GiB): reserve (GiB).
RESERVE_TIERS_GIB = ((16, 4), (64, 6), (128, 8))
MAX_RESERVE_GIB = 12
FRACTION_DECIMALS = range(2, 10)


def fixed(asked: PolicyInputs) -> MemoryCeiling:
    """``kv = engine.budget.blocks``, else ``engine.budget.bytes`` in whole blocks.

    The number is the user's: it is refused only where weights, activations and pool
    together are more than the machine has at all, or where two blocks are more than the
    bytes.
    """
    given, total = asked.budget.blocks, asked.machine.total
    blocks = asked.budget.bytes // asked.block_bytes if given is None else given

    def no(_blocks: int) -> BudgetRefusal:
        small, fits = blocks < MIN_EXPLICIT_BLOCKS, asked.blocks_in(total)
        least = MemoryPart("two KV blocks", MIN_EXPLICIT_BLOCKS * asked.block_bytes)
        pool = least if small else asked.pool(blocks)
        key, scale = ("blocks", 1) if given is not None else ("bytes", asked.block_bytes)
        right = scale * (MIN_EXPLICIT_BLOCKS if small else fits)
        return make_refusal(
            asked,
            "two KV blocks are the least" if small else f"asks for {format_bytes(pool.bytes)}",
            pool,
            option=f"engine.budget.{key}={getattr(asked.budget, key)}",
            free=f"{format_bytes(asked.machine.available)} of {format_bytes(total)}",
            settings=[(f"engine.budget.{key}", right)] if fits >= MIN_EXPLICIT_BLOCKS else [],
            direction="or more" if small else "or less",
            missing=asked.used_bytes() + least.bytes - total,
        )

    return MemoryCeiling(total, no, blocks=blocks)


def fraction(asked: PolicyInputs) -> MemoryCeiling:
    """``kv = system_ram * fraction - weights - profile_peak``.

    Refused where ``system_ram * fraction`` is more than is free now, so that a desktop
    that shares its memory is told which fraction it has left.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Proposal, path 2 (``VLLM_METAL_MEMORY_FRACTION``).
    """
    return _fraction_of(asked, asked.machine.total, "RAM", free=asked.machine.available)


def vllm(asked: PolicyInputs) -> MemoryCeiling:
    """``kv = device_memory * utilization - weights - profile_peak``.

    Device memory is the GPU's own on CUDA; here it is what the device may hold, Metal's
    recommended working set (without Metal, RAM), as in vllm-metal's released cache policy.
    Refused where the target is not free: nothing smaller is tried. Utilization is
    ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, vLLM.
    """
    machine = asked.machine
    free = min(machine.available, machine.hint)
    return _fraction_of(asked, machine.hint, _working_set_name(machine), free=free)


def mistralrs(asked: PolicyInputs) -> MemoryCeiling | BudgetRefusal:
    """``kv = min(memory_hint, ram_cap) * utilization - used``.

    ``ram_cap`` is 2/3 of RAM up to 36 GiB and 3/4 above. Weights come first, in what is
    left of ``memory_hint - allocated`` (nothing is allocated before) after a headroom of
    2 %, at least 512 MiB; mistral.rs would leave the layers that do not fit on the CPU,
    labkit refuses. ``used`` is the weights: activations are not profiled. What others
    hold is not looked at. Utilization is ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, mistral.rs.
    """
    hint, total = asked.machine.hint, asked.machine.total
    headroom = max(hint // 50, MIN_HEADROOM_BYTES)
    missing = asked.used_bytes(step=False) - (hint - headroom)
    if missing > 0:
        says = (
            f"the weights must fit in {format_bytes(hint)} less a headroom of "
            f"{format_bytes(headroom)}"
        )
        return make_refusal(asked, says, None, missing=missing, step=False)
    ram_cap = total * 2 // 3 if total <= SMALL_MACHINE_BYTES else total * 3 // 4
    of = "of working set and RAM cap, the smaller"
    return _fraction_of(asked, min(hint, ram_cap), of, free=None, step=False)


def llamacpp(asked: PolicyInputs) -> MemoryCeiling:
    """``kv = layers * 2 * kv_heads * head_dim * n_ctx * bytes``, all of it at start.

    ``n_ctx`` is ``engine.budget.blocks`` (the null block aside) times the block size; by
    default the context that the model was trained for. Weights, KV and the compute
    buffer must fit in ``memory_hint - allocated`` (nothing is allocated before). No RAM
    cap, no utilization, and what others hold is not looked at.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, llama.cpp.
    """
    given, context, hint = asked.budget.blocks, asked.model.max_context, asked.machine.hint
    option, blocks = f"engine.budget.blocks={given}", given or 0
    if given is None:
        option = f"engine.budget.policy=llamacpp (n_ctx={context}, the model's own)"
        blocks = 0 if context is None else -(-context // asked.block_size) + 1

    def no(_blocks: int) -> BudgetRefusal:
        fits = asked.blocks_in(hint)
        need = asked.used_bytes() + asked.pool(max(blocks, MIN_EXPLICIT_BLOCKS)).bytes
        return make_refusal(
            asked,
            f"policy llamacpp asks for {format_bytes(need)} of {format_bytes(hint)} "
            f"{_working_set_name(asked.machine)}"
            if blocks
            else "config.json does not say which context the model was trained for",
            asked.pool(blocks),
            option=option,
            settings=[("engine.budget.blocks", fits)] if fits >= MIN_EXPLICIT_BLOCKS else [],
            direction="or less",
            missing=need - hint,
        )

    return MemoryCeiling(hint, no, blocks=blocks)


def tiered_reserve(asked: PolicyInputs) -> MemoryCeiling:
    """``kv = system_ram - reserve - weights - profile_peak``.

    The reserve for macOS and other programs is 4 GiB up to 16 GiB of RAM, 6 up to 64,
    8 up to 128 and 12 above. It has no setting.

    Source: a first form of "Rethinking vllm-metal's Memory Budget for Apple Silicon"
    (14 February 2026).
    """
    total = asked.machine.total
    reserve = (
        next((held for most, held in RESERVE_TIERS_GIB if total <= most * GIB), MAX_RESERVE_GIB)
        * GIB
    )
    ceiling = max(0, total - reserve)

    def no(_blocks: int) -> BudgetRefusal:
        least = asked.pool(MIN_AUTO_BLOCKS)
        missing = asked.used_bytes() + least.bytes - total
        instead = ("engine.budget.policy", "fixed"), ("engine.budget.blocks", MIN_AUTO_BLOCKS)
        says = (
            f"it leaves {format_bytes(ceiling)} of {format_bytes(total)} RAM after a reserve of "
            f"{format_bytes(reserve)}"
        )
        settings: tuple[Setting, ...] = instead if missing <= 0 else ()
        return make_refusal(asked, says, least, settings=settings, missing=missing)

    return MemoryCeiling(ceiling, no)


POLICIES: dict[BudgetPolicy, Callable[[PolicyInputs], MemoryCeiling | BudgetRefusal]] = {
    BudgetPolicy.fixed: fixed,
    BudgetPolicy.fraction: fraction,
    BudgetPolicy.vllm: vllm,
    BudgetPolicy.mistralrs: mistralrs,
    BudgetPolicy.llamacpp: llamacpp,
    BudgetPolicy.tiered_reserve: tiered_reserve,
}
# Whose formula subtracts the activations, so that measuring them is worth it.
PROFILING_POLICIES = frozenset(POLICIES) - {BudgetPolicy.fixed, BudgetPolicy.mistralrs}


def _fraction_of(
    asked: PolicyInputs, base: int, of: str, *, free: int | None, step: bool = True
) -> MemoryCeiling:
    """``engine.budget.fraction`` of ``base`` bytes; at least 16 blocks must be left of it."""
    claim = int(base * asked.fraction)

    def no(blocks: int) -> BudgetRefusal:
        small, least = blocks < MIN_AUTO_BLOCKS, asked.pool(MIN_AUTO_BLOCKS)
        need = asked.used_bytes(step=step) + least.bytes
        most = base if free is None else min(base, free - asked.machine.slack)
        # A byte more than needed, as the claim is rounded down to whole bytes.
        fits = _shortest_fraction(need + 1, most, base, smallest=small)
        return make_refusal(
            asked,
            f"policy {asked.policy} asks for {format_bytes(claim)} of {format_bytes(base)} {of}",
            MemoryPart(f"{least.name} at least", least.bytes) if small else asked.pool(blocks),
            option=f"engine.budget.fraction={asked.fraction:g}",
            free="" if free is None else format_bytes(free),
            settings=[] if fits is None else [("engine.budget.fraction", fits)],
            direction="or more" if small else "or less",
            missing=max(1, need - most),
            step=step,
        )

    return MemoryCeiling(claim, no, free=free, step=step)


def _shortest_fraction(low: int, high: int, base: int, *, smallest: bool) -> float | None:
    """Return the shortest decimal just above ``low`` of ``base``, or just below ``high``.

    None: none of up to nine decimals lies between the two.
    """
    for decimals in FRACTION_DECIMALS:
        steps = 10**decimals
        toward = math.ceil(low / base * steps) if smallest else math.floor(high / base * steps)
        value: float = toward / steps
        if low / base <= value <= min(high / base, 1.0) and value > 0:
            return value
    return None


def _working_set_name(machine: MemoryProfile) -> str:
    return "Metal's working set" if machine.metal else "RAM"
