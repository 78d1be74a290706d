"""How many rows a step of decodes alone has."""

from __future__ import annotations

from typing import Protocol


class DecodeShape(Protocol):
    """Decides the shape, so that graphs and buffers of a shape can be used again.

    ``bounded``: whether there are so few shapes that each may keep a compiled graph.
    """

    name: str
    bounded: bool

    def rows(self, needed: int) -> int:
        """Return how many rows a step is given that needs ``needed``; at least as many."""
