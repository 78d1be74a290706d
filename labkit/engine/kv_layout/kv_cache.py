"""What every KV layout offers: who holds which memory, and how a step writes and reads it.

A layout is two parts.  ``KVCache`` is bookkeeping on the host, which the scheduler and the
input builder ask; ``KVMemory`` is the arrays, which the model runner asks once per step
and the model's layers through its ``Attention``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.spec import ITEM_BYTES

if TYPE_CHECKING:
    from labkit.engine.attention.paged_backend import Attention
    from labkit.engine.input_builder import Batch
    from labkit.engine.request import RequestState

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the bytes of one token's key and value, kept as ``dtype``."""
        return ITEM_BYTES[dtype] * self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A request's memory in the order of its tokens: int32 [blocks].

    Blocks of the pool; in a layout without blocks one id, which names the request's row.
    A change makes a new table, so a table that is the same object holds the same blocks.
    """

    block_ids: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.block_ids)


class KVCache(Protocol):
    """Who holds which KV memory."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""

    @property
    def held_bytes(self) -> int:
        """Bytes held for requests now, whether or not anything is computed in them."""

    def refusal(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone, in words; None: they would."""

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Hold memory for a request's first ``num_tokens`` tokens.

        Parameters
        ----------
        state
            The request.
        num_tokens
            Tokens to hold memory for.
        spare
            Share of all the memory that must be left free.

        Returns
        -------
        int or None
            How many of its tokens are computed already, never the last one known, which
            must be computed to sample the next; None, and nothing is held, if too little
            memory is free.

        Raises
        ------
        ValueError
            The request holds memory already.
        """

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Hold memory for a running request's first ``num_tokens`` tokens, old ones included.

        False, and nothing changed, if too little is free. Always true where as much was
        reserved.
        """

    def publish(self, state: RequestState) -> None:
        """Offer a running request's computed tokens for reuse, where the layout can share.

        To be called after ``num_computed_tokens`` has advanced over tokens that are final.
        """

    def table(self, request_id: str) -> BlockTable:
        """Return where the request's tokens lie."""

    def release(self, request_id: str) -> None:
        """Give back what a request holds; one that holds nothing is ignored."""

    def staying(self) -> Collection[str]:
        """Return the requests that released their memory but whose rows are still computed."""

    def clear(self) -> None:
        """Forget what is kept of requests that ended, where the layout can share."""

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests hold memory."""

    def counters(self) -> dict[str, float]:
        """Return what was counted since the last reset.

        Every layout counts ``peak_kv_bytes``, the most bytes that were held at once, and
        ``kv_used_bytes``, the most that held a computed key or value.
        """

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held now."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step's way to the keys and values, for all layers.

    Parameters
    ----------
    attention
        What the layers call.
    plan
        What it shares between them in this step.
    counters
        The step as counters; ``layout.<name>`` is one of them.
    """

    attention: Attention
    plan: Any
    counters: Mapping[str, float]


class KVMemory(Protocol):
    """The arrays that hold keys and values."""

    @property
    def attention(self) -> Attention:
        """What writes and reads the arrays, in every step."""

    def plan(self, batch: Batch) -> tuple[Batch, Step]:
        """Prepare a step; memory may grow or move.

        Returns
        -------
        tuple
            The batch as the model computes it, which may have inert rows more than the
            one given (same ``logit_rows`` in the same order), and its attention.
        """


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A layout's two parts."""

    cache: KVCache
    memory: KVMemory


class LayoutKind(Protocol):
    """Makes layouts of one kind: for the engine, for the self-test, for profiling."""

    def create(self, shapes: tuple[LayerShape, ...], num_blocks: int) -> KVLayout:
        """Make a layout of so much memory.

        Parameters
        ----------
        shapes
            What each layer caches per token.
        num_blocks
            The memory, in blocks of ``engine.kv.block_size`` tokens; one of them is the
            paged pool's null block.
        """

    def holding(self, shapes: tuple[LayerShape, ...], requests: int, tokens: int) -> KVLayout:
        """Make a layout just large enough for so many requests of so many tokens each."""
