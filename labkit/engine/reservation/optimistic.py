"""Optimistic reservation: blocks for the tokens known, the rest as they come.

As in vLLM: a watermark of free blocks keeps the next admission from being preempted at
once, and a request that runs out of blocks sends the last in line back to the queue.
"""

from __future__ import annotations

from labkit.engine.request import RequestState


class Optimistic:
    """Admits on the tokens known, and leaves a share ``watermark`` of the blocks free."""

    name = "optimistic"

    def __init__(self, watermark: float) -> None:
        self._watermark = watermark

    def tokens(self, state: RequestState) -> int:
        """See ``Reservation.tokens``."""
        return state.num_tokens

    def spare(self, num_running: int) -> float:
        """See ``Reservation.spare``."""
        return self._watermark if num_running else 0.0
