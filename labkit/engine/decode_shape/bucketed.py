"""``engine.decode_shape=bucketed``: a few shapes, each at most twice what is needed."""

from __future__ import annotations


class Bucketed:
    """The next power of two, at most ``capacity``, the rows there can be."""

    name = "bucketed"
    bounded = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, needed: int) -> int:
        """Return the bucket."""
        bucket = 1 << (needed - 1).bit_length()
        return max(needed, min(bucket, self._capacity))
