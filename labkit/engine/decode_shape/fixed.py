"""``engine.decode_shape=fixed``: one shape, a row for every request there can be.

Tested and rejected in llama.cpp's serving loop (seed 003): rows for nobody cost in
proportion to how many they are.
"""

from __future__ import annotations


class Fixed:
    """Always ``capacity``, the rows there can be."""

    name = "fixed"
    bounded = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, needed: int) -> int:
        """Return the capacity."""
        return max(needed, self._capacity)
