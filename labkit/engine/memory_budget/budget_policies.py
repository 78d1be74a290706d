"""The published budget policies, one function each: how much memory may an engine use?

A policy is a pure function that returns a memory ceiling or a refusal. "Rethinking vllm-metal's
Memory Budget for Apple Silicon" (14 February 2026) compares the policies; each function names its
source.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from labkit.config import BudgetPolicy
from labkit.engine.memory_budget.budget_decision import (
    MIN_AUTO_BLOCKS,
    MIN_EXPLICIT_BLOCKS,
    WITHOUT_ACTIVATIONS,
    BudgetRefusal,
    MemoryCeiling,
    MemoryPart,
    PolicyInputs,
    Setting,
    format_bytes,
    make_refusal,
)
from labkit.machine.facts.memory_capacity import MemoryProfile

GIB = 1 << 30
SMALL_MACHINE_BYTES = 36 * GIB
MIN_HEADROOM_BYTES = 512 << 20
# (largest RAM of the tier, memory reserved for macOS and other programs), both in GiB.
RESERVE_TIERS_GIB = ((16, 4), (64, 6), (128, 8))
MAX_RESERVE_GIB = 12
FRACTION_DECIMALS = range(2, 10)


def fixed(inputs: PolicyInputs) -> MemoryCeiling:
    """``kv = engine.budget.blocks``, or ``engine.budget.bytes`` rounded down to whole blocks.

    The configured size is refused only if weights, activations and pool together exceed the
    machine's memory, or if the pool would have fewer than two blocks.
    """
    given, total = inputs.budget.blocks, inputs.machine.total
    blocks = inputs.budget.bytes // inputs.block_bytes if given is None else given

    def refusal(_blocks: int) -> BudgetRefusal:
        too_small, max_blocks = blocks < MIN_EXPLICIT_BLOCKS, inputs.blocks_under(total)
        smallest = MemoryPart("two KV blocks", MIN_EXPLICIT_BLOCKS * inputs.block_bytes)
        pool = smallest if too_small else inputs.pool_part(blocks)
        key, scale = ("blocks", 1) if given is not None else ("bytes", inputs.block_bytes)
        fitting = scale * (MIN_EXPLICIT_BLOCKS if too_small else max_blocks)
        return make_refusal(
            inputs,
            "a pool needs at least two KV blocks"
            if too_small
            else f"it asks for {format_bytes(pool.bytes)}",
            pool,
            option=f"engine.budget.{key}={getattr(inputs.budget, key)}",
            free=f"{format_bytes(inputs.machine.available)} of {format_bytes(total)}",
            settings=[(f"engine.budget.{key}", fitting)]
            if max_blocks >= MIN_EXPLICIT_BLOCKS
            else [],
            direction="or more" if too_small else "or less",
            missing=inputs.fixed_bytes() + smallest.bytes - total,
        )

    return MemoryCeiling(total, refusal, blocks=blocks)


def fraction(inputs: PolicyInputs) -> MemoryCeiling:
    """``kv = system_ram * fraction - weights - profile_peak``.

    The policy refuses if ``system_ram * fraction`` exceeds the memory that is free now. This may
    happen on a desktop with other programs. The message then names a fraction that fits.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Proposal, path 2 (``VLLM_METAL_MEMORY_FRACTION``).
    """
    return _fraction_of(inputs, inputs.machine.total, "RAM", free=inputs.machine.available)


def vllm(inputs: PolicyInputs) -> MemoryCeiling:
    """``kv = device_memory * utilization - weights - profile_peak``.

    On CUDA, device memory is the GPU's own. Here it is Metal's recommended working set, as in
    vllm-metal's released cache policy; without Metal it is RAM. If ``device_memory * utilization``
    is not free, the policy refuses and tries no smaller pool. Utilization is
    ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, vLLM.
    """
    machine = inputs.machine
    free = min(machine.available, machine.working_set)
    return _fraction_of(inputs, machine.working_set, _working_set_name(machine), free=free)


def mistralrs(inputs: PolicyInputs) -> MemoryCeiling | BudgetRefusal:
    """``kv = min(memory_hint, ram_cap) * utilization - used``.

    ``memory_hint`` is the recommended working set. ``ram_cap`` is 2/3 of RAM on machines with up to
    36 GiB, else 3/4. The weights are placed first and must fit in ``memory_hint - allocated``
    (nothing is allocated yet) minus a headroom: 2 % of ``memory_hint``, or 512 MiB if that is more.
    If they do not fit, mistral.rs leaves layers on the CPU; labkit refuses. ``used`` is the weights
    alone: activations are not profiled, and memory held by other programs is not checked.
    Utilization is ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, mistral.rs.
    """
    working_set, total = inputs.machine.working_set, inputs.machine.total
    headroom = max(working_set // 50, MIN_HEADROOM_BYTES)
    missing = inputs.fixed_bytes() - (working_set - headroom)
    if missing > 0:
        problem = (
            f"the weights must fit in {format_bytes(working_set)} minus a headroom of "
            f"{format_bytes(headroom)}"
        )
        return make_refusal(inputs, problem, None, missing=missing)
    ram_cap = total * 2 // 3 if total <= SMALL_MACHINE_BYTES else total * 3 // 4
    base_name = "(the smaller of working set and RAM cap)"
    return _fraction_of(inputs, min(working_set, ram_cap), base_name, free=None)


def llamacpp(inputs: PolicyInputs) -> MemoryCeiling:
    """``kv = layers * 2 * kv_heads * head_dim * n_ctx * bytes``, all of it allocated at start.

    ``n_ctx`` is ``engine.budget.blocks`` (without the null block) times the block size; by
    default it is the context that the model was trained for. Weights, KV and the compute
    buffer must fit in ``memory_hint - allocated`` (nothing is allocated yet), where
    ``memory_hint`` is the recommended working set. There is no RAM cap and no utilization, and
    memory held by other programs is not checked.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, llama.cpp.
    """
    given, context = inputs.budget.blocks, inputs.model.max_context
    working_set = inputs.machine.working_set
    option, blocks = f"engine.budget.blocks={given}", given or 0
    if given is None:
        option = f"engine.budget.policy=llamacpp (n_ctx={context}, the model's own)"
        blocks = 0 if context is None else -(-context // inputs.engine.kv.block_size) + 1

    def refusal(_blocks: int) -> BudgetRefusal:
        max_blocks = inputs.blocks_under(working_set)
        pool = inputs.pool_part(max(blocks, MIN_EXPLICIT_BLOCKS))
        need = inputs.fixed_bytes() + pool.bytes
        return make_refusal(
            inputs,
            f"policy llamacpp asks for {format_bytes(need)} of {format_bytes(working_set)} "
            f"{_working_set_name(inputs.machine)}"
            if blocks
            else "config.json does not give the context length that the model was trained for",
            inputs.pool_part(blocks),
            option=option,
            settings=[("engine.budget.blocks", max_blocks)]
            if max_blocks >= MIN_EXPLICIT_BLOCKS
            else [],
            direction="or less",
            missing=need - working_set,
        )

    return MemoryCeiling(working_set, refusal, blocks=blocks)


def tiered_reserve(inputs: PolicyInputs) -> MemoryCeiling:
    """``kv = system_ram - reserve - weights - profile_peak``.

    The reserve for macOS and other programs is 4 GiB on machines with up to 16 GiB of RAM, 6 GiB
    up to 64, 8 GiB up to 128 and 12 GiB above. No option sets the reserve. The tiers are labkit's
    own: no published engine or article has them.
    """
    total = inputs.machine.total
    tiers = (reserve for max_gib, reserve in RESERVE_TIERS_GIB if total <= max_gib * GIB)
    reserve = next(tiers, MAX_RESERVE_GIB) * GIB
    ceiling = max(0, total - reserve)

    def refusal(_blocks: int) -> BudgetRefusal:
        smallest = inputs.pool_part(MIN_AUTO_BLOCKS)
        missing = inputs.fixed_bytes() + smallest.bytes - total
        instead = ("engine.budget.policy", "fixed"), ("engine.budget.blocks", MIN_AUTO_BLOCKS)
        problem = (
            f"the policy leaves {format_bytes(ceiling)} of {format_bytes(total)} RAM after a "
            f"reserve of {format_bytes(reserve)}"
        )
        settings: tuple[Setting, ...] = instead if missing <= 0 else ()
        return make_refusal(inputs, problem, smallest, settings=settings, missing=missing)

    return MemoryCeiling(ceiling, refusal)


def free_memory(inputs: PolicyInputs) -> MemoryCeiling | BudgetRefusal:
    """``kv = (free - weights) * fraction``: a share of what is free after the model is loaded.

    ``free`` is the memory that is free before, at most the recommended working set. The fraction is
    ``engine.budget.fraction``, 0.8 by default. Activations are not counted.

    Source: "Inference Engines 2/N: Batching and PagedAttention", Phase 3, step 2
    (``budget_n_blocks``).
    """
    loaded = inputs.fixed_bytes()
    left = min(inputs.machine.available, inputs.machine.working_set) - loaded
    smallest = inputs.pool_part(MIN_AUTO_BLOCKS)
    if left < smallest.bytes:
        problem = f"{format_bytes(max(0, left))} are free after loading"
        missing = smallest.bytes - left
        return make_refusal(inputs, problem, smallest, missing=missing)
    return _fraction_of(inputs, left, "free after loading", free=None, loaded=loaded)


POLICIES: dict[BudgetPolicy, Callable[[PolicyInputs], MemoryCeiling | BudgetRefusal]] = {
    BudgetPolicy.fixed: fixed,
    BudgetPolicy.fraction: fraction,
    BudgetPolicy.vllm: vllm,
    BudgetPolicy.mistralrs: mistralrs,
    BudgetPolicy.llamacpp: llamacpp,
    BudgetPolicy.tiered_reserve: tiered_reserve,
    BudgetPolicy.free_memory: free_memory,
}
# Policies that subtract the activations, so that measured activations change the pool.
PROFILING_POLICIES = frozenset(POLICIES) - {BudgetPolicy.fixed, *WITHOUT_ACTIVATIONS}


def _fraction_of(
    inputs: PolicyInputs,
    base: int,
    base_name: str,
    *,
    free: int | None,
    loaded: int = 0,
) -> MemoryCeiling:
    """Return a ceiling of ``loaded`` bytes plus ``engine.budget.fraction`` times ``base`` bytes.

    The ceiling is refused if it leaves room for fewer than ``MIN_AUTO_BLOCKS`` blocks, or if it is
    above ``free`` bytes (None: not checked). ``base_name`` describes ``base`` in the message.
    """
    share = int(base * inputs.fraction)

    def refusal(blocks: int) -> BudgetRefusal:
        too_small, smallest = blocks < MIN_AUTO_BLOCKS, inputs.pool_part(MIN_AUTO_BLOCKS)
        need = inputs.fixed_bytes() + smallest.bytes - loaded
        limit = base if free is None else min(base, free - inputs.machine.slack)
        # One byte more than needed, as the ceiling is rounded down to whole bytes.
        fitting = _shortest_fraction(need + 1, limit, base, smallest=too_small)
        return make_refusal(
            inputs,
            f"policy {inputs.policy} asks for {format_bytes(share)} of {format_bytes(base)} "
            f"{base_name}",
            MemoryPart(f"{smallest.name} at least", smallest.bytes)
            if too_small
            else inputs.pool_part(blocks),
            option=f"engine.budget.fraction={inputs.fraction:g}",
            free="" if free is None else format_bytes(free),
            settings=[] if fitting is None else [("engine.budget.fraction", fitting)],
            direction="or more" if too_small else "or less",
            missing=max(1, need - limit),
        )

    return MemoryCeiling(loaded + share, refusal, free=free)


def _shortest_fraction(low: int, high: int, base: int, *, smallest: bool) -> float | None:
    """Return the shortest decimal fraction of ``base`` between ``low`` and ``high`` bytes.

    With ``smallest`` the fraction is just above ``low / base``, else just below ``high / base``.
    Returns None if no fraction of up to nine decimals lies between ``low`` and ``high``. Example: a
    need of 2.3 GiB of 32 GiB gives 0.08 (with ``smallest``).
    """
    for decimals in FRACTION_DECIMALS:
        scale = 10**decimals
        steps = math.ceil(low / base * scale) if smallest else math.floor(high / base * scale)
        value: float = steps / scale
        if low / base <= value <= min(high / base, 1.0) and value > 0:
            return value
    return None


def _working_set_name(machine: MemoryProfile) -> str:
    return "Metal's working set" if machine.metal else "RAM"
