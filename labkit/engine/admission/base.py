"""The small protocol of admission: when waiting requests may join."""

from __future__ import annotations

from typing import Protocol


class Admission(Protocol):
    """Says when the scheduler may admit; owns no request and no block."""

    name: str

    def open(self, num_running: int, budget: int) -> bool:
        """Tell whether another waiting request may join.

        Parameters
        ----------
        num_running
            Requests that were running when the step began.
        budget
            Tokens left in the step.
        """
