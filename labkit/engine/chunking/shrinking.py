"""A cap that shrinks with the decode load.

A chunk and the decodes beside it are together ``chunk`` tokens, so that a step costs
decoding requests the same however many they are: the leftover-after-decode budget of
LocalAI's patched llama.cpp (DECODE_SERVING_SCOPE.md, patch 0016), for each request.
"""

from __future__ import annotations


class Shrinking:
    """``chunk`` tokens less one for each decode, at least 1."""

    name = "shrinking"

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def cap(self, num_decodes: int) -> int | None:
        """See ``Chunking.cap``."""
        return max(1, self._chunk - num_decodes)
