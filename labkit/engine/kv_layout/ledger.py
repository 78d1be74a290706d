"""What layouts count: bytes held, bytes copied, tokens that the memory was for."""

from __future__ import annotations

import math


class UsedTokens:
    """How many computed tokens are held, now and at most.

    A token shared by several requests counts for each of them, at most up to what is held.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._total = 0
        self.peak: float = 0

    def note(self, request_id: str, tokens: int, held: float = math.inf) -> None:
        """Say that a request has so many computed tokens now; memory for ``held`` is held."""
        self._total += tokens - self._tokens.get(request_id, 0)
        self._tokens[request_id] = tokens
        self.peak = max(self.peak, min(self._total, held))

    def forget(self, request_id: str) -> None:
        """Say that a request holds none any more."""
        self._total -= self._tokens.pop(request_id, 0)

    def reset(self, held: float = math.inf) -> None:
        """Start the peak anew, from what is used now; memory for ``held`` tokens is held."""
        self.peak = min(self._total, held)


class Ledger:
    """Bytes of KV memory: allocated now and at most, and copied from one place to another."""

    def __init__(self) -> None:
        self.held = self.peak = self.copied = self.moves = 0

    def allocate(self, size: int) -> None:
        """Count memory that was allocated."""
        self.held += size
        self.peak = max(self.peak, self.held)

    def free(self, size: int) -> None:
        """Count memory that was let go."""
        self.held -= size

    def reset(self) -> None:
        """Start counting anew; the peak restarts from what is held."""
        self.peak, self.copied, self.moves = self.held, 0, 0

    def counters(self) -> dict[str, float]:
        """Return what was counted."""
        return {
            "peak_kv_bytes": self.peak,
            "kv.bytes_copied": self.copied,
            "kv.moves": self.moves,
        }
