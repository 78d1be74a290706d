"""Options of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import CLASS_PATH, Group, ReadBy, option

ATTENTION_BACKENDS = ("fused", "gather", "sdpa", "reference")
RESOLVERS = ("binary_search", "seq_map", "identity", "padded_grid", "work_plan")


class Device(Enum):
    """Device of the fused attention kernels.

    emulated: a CPU emulator runs the Metal kernels; cuda: an NVIDIA GPU does.
    """

    cpu = "cpu"
    emulated = "emulated"
    metal = "metal"
    cuda = "cuda"


BACKEND = "engine.attention.backend"
FUSED = ReadBy(BACKEND, ("fused",))


@dataclass
class Attention(Group, place="engine.attention"):
    """Attention: backend, device, and options of the fused kernels."""

    # A class path is checked by importing it, in the worker.
    backend: str = option(
        "fused", "Attention backend.", choices=ATTENTION_BACKENDS, class_path=True
    )
    device: Device = option(Device.cpu, read_by=FUSED)
    resolver: str = option(
        "binary_search",
        "How a kernel maps a query token to its request.",
        choices=RESOLVERS,
        class_path=True,
        read_by=ReadBy(BACKEND, ("fused", CLASS_PATH)),
    )
    split_kv: str = option(
        "off",
        "Partitions of a query's keys (split-KV, flash decoding).",
        choices=("off", "auto"),
        ge=2,
        le=1024,
        unit="partitions",
        read_by=FUSED,
    )
    gqa_sharing: bool = option(
        True,
        "In the decode kernel, the query heads of a group load their KV head once.",
        read_by=FUSED,
    )
    window_skip: bool = option(
        True,
        "Skip KV blocks outside the sliding window instead of reading and masking them.",
        read_by=FUSED,
    )
    tile_threshold: int = option(
        2,
        "The tiled kernel is used if the batch's longest sequence has this many query tokens or "
        "more.",
        ge=2,
        le=1 << 20,
        unit="query tokens",
        read_by=FUSED,
    )
