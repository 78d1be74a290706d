"""The small protocols of batching: whose tokens come first, and who shares a step.

Both are pure. The scheduler fills a step phase by phase; an order and a composition only
say in which sequence and when to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """What a part of a step does: one more token each, or tokens to catch up with."""

    decode = "decode"
    prefill = "prefill"


Phases = tuple[Phase, Phase]
DECODE_FIRST: Phases = (Phase.decode, Phase.prefill)
PREFILL_FIRST: Phases = (Phase.prefill, Phase.decode)


class Order(Protocol):
    """Whose tokens come first."""

    name: str

    def sharing(self) -> Phases:
        """Return who draws on the token budget first in a step that both share."""

    def turns(self, last: Phase | None) -> Phases:
        """Return who may have a whole step, by preference.

        Parameters
        ----------
        last
            Whose the last step was; None: both had a part, or there was none.
        """


class Composition(Protocol):
    """Who shares a step."""

    name: str

    def compose(self, order: Order, last: Phase | None, fill: Callable[[Phase], int]) -> None:
        """Fill a step.

        Parameters
        ----------
        order
            Whose tokens come first.
        last
            See ``Order.turns``.
        fill
            Adds all tokens of a phase that the step has room for; returns how many.
        """
