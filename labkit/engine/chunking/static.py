"""A cap that is always the same."""

from __future__ import annotations


class Static:
    """``chunk`` tokens of a request per step; None: no cap."""

    name = "static"

    def __init__(self, chunk: int | None) -> None:
        self._chunk = chunk

    def cap(self, num_decodes: int) -> int | None:
        """See ``Chunking.cap``."""
        return self._chunk
