"""The small protocol of reservation: what a request must find free to be admitted."""

from __future__ import annotations

from typing import Protocol

from labkit.engine.request import RequestState


class Reservation(Protocol):
    """Says how many tokens' blocks an admission holds, and how much it leaves free."""

    name: str

    def tokens(self, state: RequestState) -> int:
        """Return for how many tokens a request holds blocks when it is admitted."""

    def spare(self, num_running: int) -> float:
        """Return the share of the memory that an admission must leave free.

        0 where nothing runs: a request that fits the pool is then always admitted.
        """
