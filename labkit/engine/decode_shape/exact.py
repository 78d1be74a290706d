"""``engine.decode_shape=exact``: no padding."""

from __future__ import annotations


class Exact:
    """As many rows as tokens."""

    name = "exact"
    bounded = False

    def rows(self, needed: int) -> int:
        """Return what is needed."""
        return needed
