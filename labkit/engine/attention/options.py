"""The switches of the fused kernels, the same on every device."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.metal.dispatch import partitions


@dataclass(frozen=True, slots=True)
class FusedOptions:
    """How a fused backend indexes and walks; none of it changes what is computed.

    Parameters
    ----------
    resolver
        ``binary_search``, ``seq_map``, ``identity``, ``padded_grid``, ``work_plan`` or
        ``package.module:Class``.
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
        partitions(self.split_kv, units=1, busy=1, max_seq_len=1, pure_decode=False)
        if self.tile_threshold < 2:
            raise ValueError(
                f"tile_threshold={self.tile_threshold}: allowed are 2 or more (query tokens)"
            )
