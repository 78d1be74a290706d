"""The small protocol of chunking: how much of one prompt a step may compute."""

from __future__ import annotations

from typing import Protocol


class Chunking(Protocol):
    """Caps the tokens of one request in one step, besides the step's own budget."""

    name: str

    def cap(self, num_decodes: int) -> int | None:
        """Return the cap in tokens, at least 1; None: no cap.

        Parameters
        ----------
        num_decodes
            Running requests that have one token each to compute.
        """
