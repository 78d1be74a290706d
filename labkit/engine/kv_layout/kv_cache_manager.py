"""What every KV layout offers: who holds which memory, and how a step writes and reads it.

A layout is two parts.  ``KVCacheManager`` is bookkeeping on the host, which the scheduler and the
input builder ask; ``KVMemory`` is the arrays, which the model runner asks once per step
and the model's layers through its ``Attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.engine.budget.kv_demand import blocks_for

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.attention_protocol import Attention
    from labkit.engine.batch import Batch
    from labkit.engine.kv_layout.kv_shape import KVShape
    from labkit.engine.request import RequestState


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


class ComputedTokenCount:
    """How many computed tokens are held, now and at most.

    A token shared by several requests counts for each of them, at most up to what is held.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._total = 0
        self.peak: float = 0

    def update(self, request_id: str, tokens: int, held: float = math.inf) -> None:
        """Say that a request has so many computed tokens now; memory for ``held`` is held."""
        self._total += tokens - self._tokens.get(request_id, 0)
        self._tokens[request_id] = tokens
        self.peak = max(self.peak, min(self._total, held))

    def remove(self, request_id: str) -> int:
        """Say that a request holds none any more; return how many it held."""
        tokens = self._tokens.pop(request_id, 0)
        self._total -= tokens
        return tokens

    def reset(self, held: float = math.inf) -> None:
        """Start the peak anew, from what is used now; memory for ``held`` tokens is held."""
        self.peak = min(self._total, held)


class KVCacheManager:
    """Who holds which KV memory; as it is, nothing is shared, and nothing kept of who ended.

    ``token_bytes``: bytes of one token's keys and values over all layers.
    """

    def __init__(self, token_bytes: int) -> None:
        self.token_bytes = token_bytes
        self._tables: dict[str, BlockTable] = {}
        self._used = ComputedTokenCount()
        self._slots = self._filled = 0  # of those who have left

    @property
    def held_bytes(self) -> int:
        """Bytes held for requests now, whether or not anything is computed in them."""
        raise NotImplementedError

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can hold at most, alone."""
        raise NotImplementedError

    def refusal_reason(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone, in words; None: they would."""
        raise NotImplementedError

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Hold memory for a request's first ``num_tokens`` tokens.

        ``spare`` is the share of all the memory that must be left for others.

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
        raise NotImplementedError

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Hold memory for a running request's first ``num_tokens`` tokens, old ones included.

        False, and nothing changed, if too little is free. Always true where as much was
        reserved.
        """
        raise NotImplementedError

    def cache_blocks(self, state: RequestState) -> None:
        """Offer a running request's computed tokens for reuse, where the layout can share.

        To be called after ``num_computed_tokens`` has advanced over tokens that are final: a
        drafted token that may yet be rejected must not be among them.
        """
        self._used.update(state.request_id, state.num_computed_tokens)

    def table(self, request_id: str) -> BlockTable:
        """Return where the request's tokens lie."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Give back what a request holds; one that holds nothing is ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._filled += self._used.remove(request_id)
            self._slots += self.slots(table)
            self._free(request_id, table)

    def slots(self, table: BlockTable) -> int:
        """Return for how many tokens a request with this table holds memory."""
        raise NotImplementedError

    def _free(self, request_id: str, table: BlockTable) -> None:
        raise NotImplementedError

    def lingering_requests(self) -> Collection[str]:
        """Return the requests that released their memory but whose rows are still computed."""
        return ()

    def clear(self) -> None:
        """Forget what is kept of requests that ended, where the layout can share."""

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests hold memory."""
        if set(self._tables) != running:
            raise AssertionError(f"memory is held by {set(self._tables)}, running are {running}")

    def counters(self) -> dict[str, float]:
        """Return what was counted since the last reset.

        Every layout counts ``peak_kv_bytes``, the most bytes that were held at once, and
        ``kv_used_bytes``, the most that held a computed key or value; and of the requests that
        left the tokens that they held memory for, and those that they had computed.
        """
        return {
            "kv_used_bytes": self._used.peak * self.token_bytes,
            "kv.slots_held": self._slots,
            "kv.slots_filled": self._filled,
        }

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held now."""
        self._used.reset()
        self._slots = self._filled = 0


class StepAttention(NamedTuple):
    """One step's way to the keys and values, for all layers.

    ``attention`` is what the layers call, ``plan`` what it shares between them in this step,
    ``counters`` the step as counters; ``layout.<name>`` is one of them.
    """

    attention: Attention
    plan: Any
    counters: Mapping[str, float]


class KVMemory(Protocol):
    """The arrays that hold keys and values."""

    @property
    def attention(self) -> Attention:
        """What writes and reads the arrays, in every step."""

    def plan(self, batch: Batch) -> tuple[Batch, StepAttention]:
        """Prepare a step; memory may grow or move.

        Returns
        -------
        tuple
            The batch as the model computes it, which may have inert rows more than the
            one given (same ``logit_rows`` in the same order), and its attention.
        """


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layout's two parts."""

    cache: KVCacheManager
    memory: KVMemory


@dataclass(frozen=True)
class KVCacheFactory:
    """Makes layouts of one kind: for the engine, for the self-test, for profiling.

    ``create`` takes what each layer caches per token, and the memory in blocks of ``kv``; one
    of them is the paged pool's null block.
    """

    kv: config.KV
    create: Callable[[tuple[KVShape, ...], int], KVCache]

    def create_for(self, shapes: tuple[KVShape, ...], requests: int, tokens: int) -> KVCache:
        """Make a layout just large enough for so many requests of so many tokens each."""
        return self.create(shapes, blocks_for(self.kv, [tokens] * requests))
