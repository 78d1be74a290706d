"""Options of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option
from labkit.config.requests import length_option

MAX_STATE_SNAPSHOTS = 1 << 16


class KVLayout(Enum):
    """Memory layout of keys and values.

    padded: one tensor for the batch, padded to its longest request. contiguous: a growing cache
    per request. paged: blocks of a pool.
    """

    padded = "padded"
    contiguous = "contiguous"
    paged = "paged"


class FreeList(Enum):
    """Which free block is allocated next.

    lifo: the one freed last, so that few requests touch little of a large pool. fifo: the one that
    has been free for longest.
    """

    lifo = "lifo"
    fifo = "fifo"


class PrefixInsert(Enum):
    """When a request's full blocks enter the prefix cache.

    computed: as soon as they are computed, for requests that run at the same time. finish: when the
    request ends.
    """

    computed = "computed"
    finish = "finish"


PREFIX_CACHES = ReadBy("engine.prefix_cache", ("hash", "radix"))


class Precision(Enum):
    """Floating-point type."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class KVDType(Enum):
    """Precision in which keys and values are stored; attention computes in float32.

    int8, int4: quantised in groups of 64 elements along the head, each with a scale and a bias in
    float32, as in mlx_lm's QuantizedKVCache.
    """

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"

    @property
    def quantised(self) -> bool:
        """Whether keys and values are stored as integers with scales and biases."""
        return self in (KVDType.int8, KVDType.int4)


@dataclass
class KV(Group, place="engine.kv"):
    """KV cache: layout, block size, precision, and how a request's memory grows."""

    layout: KVLayout = option(KVLayout.paged)
    block_size: int = option(16, "Tokens per KV block.", choices=(8, 16, 32, 64), unit="tokens")
    dtype: KVDType = option(KVDType.float32)
    free_list: FreeList = option(
        FreeList.lifo, read_by=ReadBy("engine.kv.layout", (KVLayout.paged,))
    )
    prefix_insert: PrefixInsert = option(PrefixInsert.computed, read_by=PREFIX_CACHES)
    window_pools: bool = option(
        False,
        "Give the layers of each sliding window a pool of their own, and free the blocks behind "
        "the window.",
        read_by=ReadBy("engine.kv.layout", (KVLayout.paged,)),
    )
    state_snapshots: int | None = option(
        None,
        "Snapshots of recurrent states kept for engine.prefix_cache; models without such states "
        "need none.",
        ge=1,
        le=MAX_STATE_SNAPSHOTS,
        unit="snapshots",
        null_means="engine.scheduler.max_num_seqs",
    )
    set_aside: int | None = length_option(
        None,
        "KV memory reserved for every request when it starts, regardless of its length.",
        null_means="a cache that grows",
        read_by=ReadBy("engine.kv.layout", (KVLayout.contiguous,)),
    )
    growth_step: int = length_option(
        256,
        "Tokens by which a request's cache grows when it is full; every growth copies the cache. "
        "256: as mlx_lm's caches grow; 1: one row per token.",
        read_by=ReadBy("engine.kv.layout", (KVLayout.contiguous,)),
    )
