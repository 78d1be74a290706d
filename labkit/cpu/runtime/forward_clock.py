"""Clocks within a forward: how long its attention, its products and its greedy sampling took.

``FORWARD_CLOCK`` holds the clock of the forward that runs in this context, or None. Attention,
products and the replay of a captured graph add their times to it. Without a clock they read no
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class ForwardClock:
    """Seconds of the timed parts of forwards. ``nodes``: timed nodes of captured graphs."""

    def __init__(self) -> None:
        self.attention = self.products = self.sample = 0.0
        self.nodes = 0

    @contextmanager
    def timing_forward(self) -> Iterator[None]:
        """Let the forward in the ``with`` block add its times to this clock."""
        token = FORWARD_CLOCK.set(self)
        try:
            yield
        finally:
            FORWARD_CLOCK.reset(token)


FORWARD_CLOCK: ContextVar[ForwardClock | None] = ContextVar("forward_clock", default=None)
CLOCK_ID = time.CLOCK_MONOTONIC  # of the nodes' stamps
