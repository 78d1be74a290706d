"""Full reservation: blocks to the request's very end, so that nothing is ever preempted."""

from __future__ import annotations

from labkit.engine.request import RequestState


class Full:
    """Holds blocks for the prompt and all ``max_tokens``, however few will be used."""

    name = "full"

    def tokens(self, state: RequestState) -> int:
        """See ``Reservation.tokens``."""
        return state.max_cached_tokens

    def spare(self, num_running: int) -> float:
        """See ``Reservation.spare``."""
        return 0.0
