"""What layouts without blocks keep books of: who has which piece of memory, and bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from labkit.engine.budget.capacity import rounded
from labkit.engine.kv_layout.kv_cache import BlockTable, LayerShape

if TYPE_CHECKING:
    from labkit.engine.request import RequestState


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


class Pieces:
    """The part of ``KVCache`` that layouts share whose requests have a piece of memory each.

    Parameters
    ----------
    shapes
        What each layer caches per token.
    capacity
        Tokens of memory that may be promised to all requests together.
    piece
        What a request has, in words.
    dtype
        What is cached: float32, float16 or bfloat16.
    """

    def __init__(
        self, shapes: tuple[LayerShape, ...], capacity: int, piece: str, dtype: str
    ) -> None:
        self.ledger = Ledger()
        self._token_bytes = sum(shape.token_bytes(dtype) for shape in shapes)
        self._capacity = capacity
        self._piece = piece
        self._tables: dict[str, BlockTable] = {}
        self._next = 0
        self._used = UsedTokens()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self._token_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now."""
        return self.ledger.held

    def refusal(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone; None: they would."""
        if rounded(num_tokens) <= self._capacity:
            return None
        return (
            f"need {self._piece} of {rounded(num_tokens)} tokens, there is room for "
            f"{self._capacity}"
        )

    def _number(self, request_id: str) -> int:
        """Name a new request's piece by a number, which is its table."""
        number, self._next = self._next, self._next + 1
        self._tables[request_id] = BlockTable(np.array([number], np.int32))
        return number

    def publish(self, state: RequestState) -> None:
        """Note what is computed: a piece of its own cannot be shared."""
        self._used.note(state.request_id, state.num_computed_tokens)

    def table(self, request_id: str) -> BlockTable:
        """Return the number of the request's piece, which never changes."""
        return self._tables[request_id]

    def clear(self) -> None:
        """Nothing is kept of requests that ended."""

    def counters(self) -> dict[str, float]:
        """Return bytes held, used and copied since the last reset."""
        used = self._used.peak * self.token_bytes
        return {**self.ledger.counters(), "kv_used_bytes": used}

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held."""
        self.ledger.reset()
        self._used.reset()
