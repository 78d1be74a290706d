"""Options of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import (
    CLASS_PATH,
    Group,
    ReadBy,
    former_name,
    option,
    override_text,
    require,
)

# Over blocks, by MLX's attention: request by request, in one padded rectangle, under one mask.
MLX_POOL_BACKENDS = ("gather", "gather_padded", "masked")
MLX_BACKENDS = (*MLX_POOL_BACKENDS, "sdpa")  # the model runs on the default device of MLX
ATTENTION_BACKENDS = ("fused", *MLX_BACKENDS, "reference")
RESOLVERS = ("binary_search", "seq_map", "identity", "padded_grid", "work_plan")
UNITS = ("auto", "head", "kv_head", "token")


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
    unit: str = option(
        "auto",
        "What a unit of the grid (a threadgroup) serves after one search for its request: one "
        "query head of a token, its query heads of one KV head, which share loads, or all its "
        "heads. auto: the device's fastest.",
        choices=UNITS,
        read_by=FUSED,
    )
    # The former name of ``unit``: true is unit=auto, false is unit=head.
    gqa_sharing: bool | None = former_name()
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

    def __post_init__(self) -> None:
        """Replace the former name of ``unit``, and check the options."""
        if self.gqa_sharing is not None:
            unit = "auto" if self.gqa_sharing else "head"
            require(
                self.unit in ("auto", unit),
                f"engine.attention.unit={self.unit}: contradicts engine.attention.gqa_sharing="
                f"{override_text(self.gqa_sharing)}, the former name of unit={unit}; set unit only",
            )
            self.unit, self.gqa_sharing = unit, None
        super().__post_init__()
