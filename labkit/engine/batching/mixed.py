"""Mixed steps: decodes and prompt chunks share one forward pass."""

from __future__ import annotations

from collections.abc import Callable

from labkit.engine.batching.base import Order, Phase


class Mixed:
    """Both phases fill every step."""

    name = "mixed"

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        """See ``Composition.compose``."""
        for phase in order.sharing():
            fill(phase)
