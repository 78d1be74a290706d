"""What every backend and kernel of the attention operation agrees on, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.attention import RESOLVERS

# Bytes of a number of each type that is computed with or kept, the reference's included.
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
BQ = 32  # query rows of the tiled kernels' units
# What a kernel stamps and what the Metal sources call it (``kernels/*.metal``).
KERNEL_IDS = {"decode": 1, "tiled": 2, "reference": 3, "reduce": 4}
RESOLVER_IDS = {name: number for number, name in enumerate(RESOLVERS, 1)}
STAMP_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
STAMP_MASK = 0xFFFFFFFF
# Columns of the rows that kernels write, one for each threadgroup or worker. Row ``i``'s stamp
# is offset by ``i``: no row may stand in for another.
STAMP, ITERATIONS, BLOCKS, SURPLUS = range(4)


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """How a fused backend indexes and walks; none of it changes what is computed.

    Parameters
    ----------
    resolver
        A built-in's name (``config.RESOLVERS``) or ``package.module:Class``.
    split_kv
        ``off``, ``auto`` or a number of partitions: who walks the keys of a query in the
        decode kernel. Another split is another order of summation.
    gqa_sharing
        Whether query heads of one KV head share its loads in the decode kernel.
    window_skip
        Whether KV blocks outside a sliding window are left out (else read and masked).
    tile_threshold
        Query tokens of the longest sequence from which a batch goes to the tiled kernel.

    Raises
    ------
    ValueError
        A number is out of its range; one line.
    """

    resolver: str = "binary_search"
    split_kv: str | int = "off"
    gqa_sharing: bool = True
    window_skip: bool = True
    tile_threshold: int = 2

    def __post_init__(self) -> None:
        """Check the ranges."""
        text = str(self.split_kv)
        if text not in ("off", "auto") and not (text.isdecimal() and 1 <= int(text) <= 1024):
            raise ValueError(f"split_kv={text}: allowed are off, auto or 1 to 1024 partitions")
        if self.tile_threshold < 2:
            raise ValueError(
                f"tile_threshold={self.tile_threshold}: allowed are 2 or more (query tokens)"
            )
