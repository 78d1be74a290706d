"""Attention: the memory of its keys and values, and the operation's switches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import OWN_CLASS, Group, ReadBy, option
from labkit.config.request_mix import MOST_TOKENS

ATTENTION_BACKENDS = ("fused", "gather", "sdpa", "reference")
RESOLVERS = ("binary_search", "seq_map", "identity", "padded_grid", "work_plan")


class KVLayout(Enum):
    """How keys and values lie in memory.

    padded: one rectangle for all requests. contiguous: a growing cache per request.
    paged: blocks of a pool.
    """

    padded = "padded"
    contiguous = "contiguous"
    paged = "paged"


class Precision(Enum):
    """A type of floating-point numbers."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Device(Enum):
    """Where the fused attention kernels run."""

    cpu = "cpu"
    emulated = "emulated"
    metal = "metal"


@dataclass
class KV(Group, place="engine.kv"):
    """Key/value memory."""

    layout: KVLayout = option(KVLayout.paged)
    block_size: int = option(16, "Tokens in a KV block.", words=(8, 16, 32), unit="tokens")
    dtype: Precision = option(
        Precision.float32,
        "What keys and values are rounded to when they are written; what is computed with them "
        "is float32.",
    )
    set_aside: int | None = option(
        None,
        "Tokens of memory that a request has from the beginning, whatever it will need.",
        least=1,
        most=MOST_TOKENS,
        unit="tokens",
        null="none: it grows",
        read_by=ReadBy("engine.kv.layout", (KVLayout.contiguous,)),
    )


BACKEND = "engine.attention.backend"
FUSED = ReadBy(BACKEND, ("fused",))


@dataclass
class Attention(Group, place="engine.attention"):
    """The attention operation: backend and device, and the fused kernels' switches."""

    # A class path is checked by importing it, in the worker.
    backend: str = option(
        "fused", "What computes attention.", words=ATTENTION_BACKENDS, own_class=True
    )
    device: Device = option(Device.cpu, read_by=FUSED)
    resolver: str = option(
        "binary_search",
        "How a kernel finds the request that a query token belongs to.",
        words=RESOLVERS,
        own_class=True,
        read_by=ReadBy(BACKEND, ("fused", OWN_CLASS)),
    )
    split_kv: str = option(
        "off",
        "Into how many partitions a query's keys are divided.",
        words=("off", "auto"),
        least=2,
        most=1024,
        unit="partitions",
        read_by=FUSED,
    )
    gqa_sharing: bool = option(
        True,
        "Query heads of one KV head share its loads in the decode kernel.",
        read_by=FUSED,
    )
    window_skip: bool = option(
        True,
        "KV blocks outside a sliding window are left out, not read and masked.",
        read_by=FUSED,
    )
    tile_threshold: int = option(
        2,
        "Query tokens of the longest sequence from which a batch goes to the tiled kernel.",
        least=2,
        most=1 << 20,
        unit="query tokens",
        read_by=FUSED,
    )
