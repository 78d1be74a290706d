"""How a step is filled: an order and a composition, a strategy per file."""

from __future__ import annotations

from labkit import config
from labkit.engine.batching.base import Composition, Order, Phase
from labkit.engine.batching.decode_first import DecodeFirst
from labkit.engine.batching.mixed import Mixed
from labkit.engine.batching.prefill_first import PrefillFirst
from labkit.engine.batching.split import Split

__all__ = ["Composition", "Order", "Phase", "create_composition", "create_order"]


def create_order(name: config.Order) -> Order:
    """Return the order that the config names."""
    kinds: dict[config.Order, type[Order]] = {
        config.Order.decode_first: DecodeFirst,
        config.Order.prefill_first: PrefillFirst,
    }
    return kinds[name]()


def create_composition(name: config.Composition) -> Composition:
    """Return the composition that the config names."""
    kinds: dict[config.Composition, type[Composition]] = {
        config.Composition.mixed: Mixed,
        config.Composition.split: Split,
    }
    return kinds[name]()
