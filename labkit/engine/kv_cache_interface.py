"""The interface of a KV layout: bookkeeping of KV memory, and the arrays of keys and values.

A layout (``KVCache``) has two parts. The ``KVCacheManager`` records which request has which memory,
for the scheduler and the input builder. An ``Attention`` over the arrays, prepared anew for each
step, is for the model runner.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit import config
from labkit.config import Admission, KVLayout
from labkit.engine.engine_protocol import EngineError
from labkit.engine.memory_budget.required_kv_slots import (
    StepLimits,
    blocks_for,
    num_state_snapshots,
)

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Attention
    from labkit.engine.attention.kv_and_state_shapes import KVShape, StateShape
    from labkit.engine.batch import Batch
    from labkit.engine.block_pool import BlockPool
    from labkit.engine.recurrent_states.state_arrays import StateStep
    from labkit.engine.recurrent_states.state_slots import StatePlan
    from labkit.engine.request import RequestState
    from labkit.engine.scheduler.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A request's blocks in the order of its tokens: int32 [num_blocks].

    In a layout without blocks the table has a single id, that of the request's row. Tables are
    immutable: the same object always has the same blocks. ``windows`` has the block ids in each
    group of layers with a sliding window, if these have pools of their own.
    """

    block_ids: NDArray[np.int32]
    windows: tuple[NDArray[np.int32], ...] = ()

    def __len__(self) -> int:
        return len(self.block_ids)


class ComputedTokenCount:
    """The number of computed tokens in the KV cache, and its peak.

    A token that several requests share is counted for each of them, but the peak never exceeds the
    number of tokens for which memory is reserved.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._total = 0
        self.peak: float = 0

    def update(self, request_id: str, tokens: int, reserved: float = math.inf) -> None:
        """Set a request's computed tokens. All together have memory for ``reserved`` tokens."""
        self._total += tokens - self._tokens.get(request_id, 0)
        self._tokens[request_id] = tokens
        self.peak = max(self.peak, min(self._total, reserved))

    def remove(self, request_id: str) -> int:
        """Remove a request; return the number of its computed tokens."""
        tokens = self._tokens.pop(request_id, 0)
        self._total -= tokens
        return tokens

    def reset(self, reserved: float = math.inf) -> None:
        """Set the peak to the present number of computed tokens, or to ``reserved`` if smaller."""
        self.peak = min(self._total, reserved)


class KVCacheManager:
    """Reserves KV memory for requests. This base class shares no memory between requests.

    ``token_bytes`` is the size in bytes of one token's keys and values over all layers. ``pool`` is
    the pool of blocks, that of the layers without a window; None in a layout without blocks.
    """

    has_states = False  # whether requests have a slot for recurrent states
    grows_by_chunk = False  # whether ``grow`` must be called for every chunk
    aligns_chunks = False  # whether ``align_chunk`` must be called for every chunk of a prompt

    def __init__(self, token_bytes: int, pool: BlockPool | None = None) -> None:
        self.token_bytes = token_bytes
        self.pool = pool
        self._tables: dict[str, BlockTable] = {}
        self._computed = ComputedTokenCount()
        self._released_slots = self._released_tokens = 0
        # Called after a failed step, to remove what it wrote to the arrays.
        self.on_failed_step: Callable[[], None] = lambda: None

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for requests now, whether or not their tokens are computed."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """The most bytes that can be reserved."""
        raise NotImplementedError

    @property
    def capacity_tokens(self) -> int:
        """The largest number of tokens that a single request can have in the KV cache."""
        raise NotImplementedError

    def refusal_reason(self, num_tokens: int) -> str | None:
        """Return the reason that ``num_tokens`` tokens can never fit, or None if they can."""
        raise NotImplementedError

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Reserve memory for a new request's first ``num_tokens`` tokens.

        ``spare`` is the fraction of the whole memory that must stay free. Returns the number of the
        request's tokens that are cached already. The last known token never counts as cached,
        because it must be computed to sample the next token. Returns None if too little memory is
        free; nothing was reserved then. Raises ``ValueError`` if the request has memory already.
        """
        raise NotImplementedError

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Ensure that a running request has memory for its first ``num_tokens`` tokens.

        Return True if the request has this memory now, even if it had enough before. If too little
        memory is free, change nothing and return False.
        """
        raise NotImplementedError

    def cache_blocks(self, state: RequestState) -> None:
        """Make a running request's computed tokens reusable, if the layout shares prefixes.

        Call this only when ``num_computed_tokens`` includes no draft tokens that may still be
        rejected.
        """
        self._computed.update(state.request_id, state.num_computed_tokens)

    @property
    def tables(self) -> Mapping[str, BlockTable]:
        """The block tables of all running requests by request id."""
        return self._tables

    def plan_states(self, output: SchedulerOutput) -> StatePlan | None:
        """Return what a step does with states, if there are any. Every call plans new snapshots."""
        return None

    def align_chunk(self, state: RequestState, start: int, count: int) -> int:
        """Return how many of ``count`` prompt tokens to compute, 1 or more, before a snapshot."""
        return count

    def used_bytes(self, num_tokens: int) -> int:
        """Return the bytes in use if the requests have computed ``num_tokens`` tokens together."""
        return min(self.reserved_bytes, num_tokens * self.token_bytes)

    def table(self, request_id: str) -> BlockTable:
        """Return a request's block table."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Release a request's memory. Ids of requests without memory are ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._released_tokens += self._computed.remove(request_id)
            self._released_slots += self.num_slots(table)
            self._free(request_id, table)

    def num_slots(self, table: BlockTable) -> int:
        """Return the number of tokens for which a request with this table has memory."""
        raise NotImplementedError

    def _free(self, request_id: str, table: BlockTable) -> None:
        raise NotImplementedError

    def lingering_requests(self) -> Collection[str]:
        """Return the ids of finished requests whose rows a static batch still computes."""
        return ()

    def clear(self) -> None:
        """Empty the prefix cache, if the layout has one."""

    def forget_failed_step(self) -> None:
        """Drop what a failed step may have left half done or wrong. No request has memory."""
        self.on_failed_step()

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests have memory."""
        if set(self._tables) != running:
            raise AssertionError(
                f"requests with memory: {', '.join(sorted(self._tables))}; running requests: "
                f"{', '.join(sorted(running))}"
            )

    def counters(self) -> dict[str, float]:
        """Return the counters since the last reset.

        Every layout has ``peak_kv_bytes``, the peak of reserved bytes, and ``kv_used_bytes``, the
        peak of bytes with computed keys and values. Two counters are sums over the released
        requests: ``kv.slots_held``, the tokens for which they had memory, and
        ``kv.slots_filled``, the tokens that they had computed.
        """
        return {
            "kv_used_bytes": self._computed.peak * self.token_bytes,
            "kv.slots_held": self._released_slots,
            "kv.slots_filled": self._released_tokens,
        }

    def reset_counters(self) -> None:
        """Set the counters to 0 and each peak to its present value."""
        self._computed.reset()
        self._released_slots = self._released_tokens = 0


class StepAttention(NamedTuple):
    """The attention of one step, shared by all layers.

    The layers call ``attention`` with ``metadata``. ``counters`` has the layout's counters for the
    step, for example ``layout.<name>``. ``rows`` has, for each packed token, its index among the
    tokens that the model computes (None: the same index). ``states`` are the recurrent states of
    the step's requests, if the model has any.
    """

    attention: Attention
    metadata: Any
    counters: Mapping[str, float]
    rows: NDArray[np.int64] | None = None
    states: StateStep | None = None


class KVCache(NamedTuple):
    """The manager of a KV layout, and the attention that writes and reads its arrays.

    ``prepare_step`` prepares the attention of a step, and may reallocate arrays. It returns the
    batch that the model computes, and its attention. A padded layout adds padding rows to the
    batch. ``logit_rows`` still refers to the same tokens in the same order.
    """

    manager: KVCacheManager
    attention: Attention
    prepare_step: Callable[[Batch], tuple[Batch, StepAttention]]


class KVCacheFactory:
    """Creates KV caches of ``options``: for serving, for the self-test, for profiling.

    ``computed`` is the dtype that the model computes in. Keys and values have the same dtype,
    unless ``engine.kv.dtype`` is narrower. ``states`` has the shape of a request's state for each
    layer that has one; it keeps its own dtype. ``windows`` has the sliding window of each layer
    with keys and values (None: the layer has no window), for ``engine.kv.window_pools``. Raises
    ``EngineError`` if the attention cannot be created. The message gives the reason.
    """

    def __init__(
        self,
        options: config.Engine,
        computed: str = "float32",
        states: tuple[StateShape, ...] = (),
        windows: tuple[int | None, ...] = (),
    ) -> None:
        from labkit.engine import attention
        from labkit.engine.model import dtype_resolution

        self._options, self._states, self._windows = options, states, windows
        self._dtype = dtype_resolution.kv_dtype(options, computed)
        self._backend = functools.partial(attention.create_from_config, options.attention)
        if options.kv.layout is KVLayout.paged:
            try:  # now rather than after the model is loaded
                self._backend()
            except ValueError as error:
                raise EngineError(str(error)) from error

    def create(
        self, shapes: tuple[KVShape, ...], num_blocks: int, num_slots: int | None = None
    ) -> KVCache:
        """Create a cache.

        ``shapes`` has the KV shape of each layer with keys and values. The memory has
        ``num_blocks`` blocks of ``kv.block_size`` tokens, in the paged layout with the null block,
        and ``num_slots`` state slots, without snapshots, in one pool (None: as for serving).
        """
        options, snapshots = self._options, 0
        if num_slots is None and options.kv.window_pools:
            cache = self._create_windowed(shapes, num_blocks)
        else:
            cache = self._create_layout(shapes, num_blocks)
        if not self._states:
            return cache
        from labkit.engine.kv_layout.kv_and_state_slots import add_states

        if num_slots is None:
            num_slots, snapshots = options.scheduler.max_num_seqs, num_state_snapshots(options)
        return add_states(cache, self._states, num_slots, snapshots)

    def create_for(self, shapes: tuple[KVShape, ...], requests: int, tokens: int) -> KVCache:
        """Create a cache just large enough for ``requests`` requests of ``tokens`` tokens each."""
        # Twice as many slots as requests, because the self-test also reserves slots for decoy
        # requests.
        num_blocks = blocks_for(self._options.kv, [tokens] * requests)
        return self.create(shapes, num_blocks, 2 * requests)

    def _create_layout(self, shapes: tuple[KVShape, ...], num_blocks: int) -> KVCache:
        options, kv, dtype = self._options, self._options.kv, self._dtype
        if kv.layout is KVLayout.contiguous:
            from labkit.engine.kv_layout import contiguous

            return contiguous.create(shapes, num_blocks * kv.block_size, dtype, kv)
        if kv.layout is KVLayout.padded:
            from labkit.engine.kv_layout import padded

            static = options.scheduler.admission is Admission.static
            return padded.create(shapes, num_blocks * kv.block_size, dtype, static=static)
        from labkit.engine.kv_layout import paged

        # The length of a reused prefix is a multiple of so many blocks.
        chunk = options.scheduler.chunk if options.prefix_align.value != "block" else None
        reuse_blocks = 1 if chunk is None else chunk // kv.block_size
        prefixes = options.prefix_cache.value, options.prefix_eviction, reuse_blocks
        return paged.create(self._backend(), shapes, num_blocks, kv, dtype, *prefixes)

    def _create_windowed(self, shapes: tuple[KVShape, ...], num_blocks: int) -> KVCache:
        from labkit.engine.kv_layout import window_pools

        limits, kv = StepLimits.of(self._options), self._options.kv
        return window_pools.create(
            self._backend, shapes, self._windows, num_blocks, kv, self._dtype, limits
        )
