"""A model and machines for the budget tests."""

from labkit import config
from labkit.engine import memory_budget
from labkit.engine.memory_budget import ModelFootprint
from labkit.machine.facts.memory_capacity import MemoryProfile

MIB, GIB = 1 << 20, 1 << 30

# 1 GiB of weights; 64 KiB of KV per token, so that a block of 16 tokens is 1 MiB.
MODEL = ModelFootprint(
    name="round",
    weight_bytes=GIB,
    kv_bytes_per_token=64 << 10,
    peak_live_floats=1024,
    vocab_size=32768,
    max_context=40960,
)
STEP = 256 * MIB


def ask(machine=None, *, model=MODEL, activations=STEP, block_size=16, **budget_options):
    """Plan ``MODEL`` with budget options, on a machine given by name or as a profile."""
    if isinstance(machine, str):
        budget_options["machine"] = machine
        machine = None
    if "policy" in budget_options:
        budget_options["policy"] = config.BudgetPolicy(budget_options["policy"])
    engine = config.Engine(
        budget=config.Budget(**budget_options), kv=config.KV(block_size=block_size)
    )
    return memory_budget.plan(engine, model, machine, activations=activations)


def mac(total, *, working_set=None, available=None):
    """Return a Mac of ``total`` bytes at the default limits; by default all memory is free."""
    share = total * 2 // 3 if total <= 32 * GIB else total * 3 // 4
    free = total if available is None else available
    return MemoryProfile(
        "a test's", total, free, share if working_set is None else working_set, metal=True
    )
