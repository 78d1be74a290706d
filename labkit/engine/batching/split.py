"""Split steps: prefill is kept out of decode steps, so that decodes keep their shape."""

from __future__ import annotations

from collections.abc import Callable

from labkit.engine.batching.base import Order, Phase


class Split:
    """The first phase with anything to compute has the step to itself."""

    name = "split"

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        """See ``Composition.compose``."""
        for phase in order.turns(last):
            if fill(phase):
                return
