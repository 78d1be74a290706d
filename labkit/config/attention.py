"""KV memory and the attention operation's switches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from labkit.config.choices import ATTENTION_BACKENDS, RESOLVERS, Device, KVLayout, Precision
from labkit.config.rules import is_class_path, require, require_strategy


@dataclass
class KV:
    """Key/value memory: its layout, the tokens in a block, and the type of its numbers.

    ``dtype``: what keys and values are rounded to when they are written; what is computed
    with them is float32.
    """

    layout: KVLayout = KVLayout.paged
    block_size: int = 16
    dtype: Precision = Precision.float32

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            self.block_size in (8, 16, 32),
            f"engine.kv.block_size={self.block_size}: allowed are 8, 16 and 32 (tokens)",
        )


@dataclass
class Attention:
    """The attention operation: backend and device, and the fused kernels' switches.

    ``backend``: fused, gather, sdpa, reference or ``package.module:Class``.
    ``resolver``: binary_search, seq_map, identity, padded_grid, work_plan or
    ``package.module:Class``. ``split_kv``: off, auto or a number of partitions of the keys.
    ``gqa_sharing``: query heads of one KV head share its loads in the decode kernel.
    ``window_skip``: KV blocks outside a sliding window are left out, not read and masked.
    ``tile_threshold``: query tokens of the longest sequence from which a batch goes to the
    tiled kernel.
    """

    backend: str = "fused"
    device: Device = Device.cpu
    resolver: str = "binary_search"
    split_kv: str = "off"
    gqa_sharing: bool = True
    window_skip: bool = True
    tile_threshold: int = 2

    def __post_init__(self) -> None:
        """Check the words; a class path is checked by importing it in the worker."""
        require_strategy("engine.attention.backend", self.backend, ATTENTION_BACKENDS)
        require_strategy("engine.attention.resolver", self.resolver, RESOLVERS)
        number = self.split_kv.isdecimal() and 2 <= int(self.split_kv) <= 1024
        require(
            self.split_kv in ("off", "auto") or number,
            f"engine.attention.split_kv={self.split_kv}: allowed are off, auto or 2 to 1024 "
            "(partitions)",
        )
        require(
            2 <= self.tile_threshold <= 1 << 20,
            f"engine.attention.tile_threshold={self.tile_threshold}: allowed are 2 to 1048576 "
            "(query tokens)",
        )
        if self.backend != "fused":
            self._refuse_switches()

    def _refuse_switches(self) -> None:
        read = {"backend", "resolver"} if is_class_path(self.backend) else {"backend"}
        for item in dataclasses.fields(self):
            name, default, value = item.name, item.default, getattr(self, item.name)
            require(
                name in read or value == default,
                f"engine.attention.{name}={getattr(value, 'value', value)}: only "
                "engine.attention.backend=fused has this switch; leave it "
                f"{getattr(default, 'value', default)}",
            )
