"""A memory budget on a Mac: the pool that a policy grants, and whether it fits."""

from __future__ import annotations

from enum import Enum
from typing import Any

from docs.generators.widgets import model_shapes
from docs.generators.widgets.page import Widget
from labkit import config
from labkit.config import BudgetPolicy
from labkit.engine.memory_budget.budget_decision import BYTE_UNITS, MIN_AUTO_BLOCKS
from labkit.engine.memory_budget.budget_policies import (
    FRACTION_DECIMALS,
    MIN_HEADROOM_BYTES,
    SMALL_MACHINE_BYTES,
)
from labkit.machine.facts.memory_capacity import MemoryProfile
from labkit.machine.facts.simulated_macs import SIMULATED_MACS, simulated_mac
from labkit.machine.facts.wired_advice import COLLECTOR_OFF, RESET_NOTE

POLICIES = (BudgetPolicy.fraction, BudgetPolicy.vllm, BudgetPolicy.mistralrs)


class MemoryOutcome(Enum):
    """The estimated outcome if an engine uses its whole budget.

    fits: the engine needs at most the free memory and at most Metal's working set. slows: it needs
    more than one of these, but at most the RAM. macOS then compresses or swaps memory and may evict
    GPU buffers, which is slow and can end in a crash. dies: it needs more than the RAM.

    Sources: "vllm-metal vs mlx_lm: Contiguous vs Paged Varlen KV Cache" (20 May 2026), the case
    study; "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026).
    """

    fits = "fits"
    slows = "slows"
    dies = "dies"


def memory_outcome(machine: MemoryProfile, needed_bytes: int) -> MemoryOutcome:
    """Return the outcome for an engine that needs ``needed_bytes`` in all."""
    if needed_bytes > machine.total:
        return MemoryOutcome.dies
    if needed_bytes > min(machine.available, machine.working_set):
        return MemoryOutcome.slows
    return MemoryOutcome.fits


def data() -> dict[str, Any]:
    """Return machines, models and constants of the policies."""
    engine, models = model_shapes.ENGINE, model_shapes.footprints()
    tokens, rows = engine.scheduler.max_step_tokens, engine.scheduler.max_num_seqs
    per_token = model_shapes.kv_bytes_per_token()
    return {
        "machine": "sim_m1_pro_32gb",
        "machines": {name: machine_sizes(simulated_mac(name)) for name in SIMULATED_MACS},
        "model": "Qwen3-8B",
        "models": {
            name: {
                "weights": model.weight_bytes,
                "activations": model.activation_bytes(tokens, rows),
                "block": engine.kv.block_size * per_token[name],
            }
            for name, model in models.items()
        },
        "policies": [policy.value for policy in POLICIES],
        "percent": round(100 * config.engine.memory_budget.DEFAULT_FRACTION),
        "block_size": engine.kv.block_size,
        "constants": {
            "min_blocks": MIN_AUTO_BLOCKS,
            "decimals": list(FRACTION_DECIMALS),
            "min_headroom": MIN_HEADROOM_BYTES,
            "small_machine": SMALL_MACHINE_BYTES,
        },
        "byte_units": BYTE_UNITS,
        "collector_off": COLLECTOR_OFF,
        "reset_note": RESET_NOTE,
    }


def machine_sizes(machine: MemoryProfile) -> dict[str, Any]:
    """Return a machine's memory, in bytes, and the state of its wired collector."""
    assert machine.wired is not None, "a simulated Mac has settings of wired memory"
    return {
        "label": _label(machine.name),
        "total": machine.total,
        "available": machine.available,
        "working_set": machine.working_set,
        "collector": machine.wired.collector,
        "limit_mb": machine.wired.limit_mb,
    }


def _label(name: str) -> str:
    """Return ``M1 Pro (32 GB)`` for ``sim_m1_pro_32gb``."""
    *chip, memory = name.removeprefix("sim_").split("_")
    return f"{' '.join(word.capitalize() for word in chip)} ({memory.removesuffix('gb')} GB)"


WIDGET = Widget(
    name="memory_budget",
    title="A memory budget: fits, slows or dies",
    source="After “Rethinking vllm-metal’s Memory Budget for Apple Silicon” (2026-02-14).",
    mirrored="<code>labkit/engine/memory_budget/</code> and "
    "<code>labkit/machine/facts/wired_advice.py</code>",
    functions=("memory_budget", "number_format"),
    data=data,
)
