"""The switches of the fused attention backends: indexing and work division, never arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """How a fused backend finds its work and divides it.

    Parameters
    ----------
    resolver
        A built-in resolver's name (``config.RESOLVERS``) or ``package.module:Class``.
    split_kv
        ``off``, ``auto`` or a number of partitions among which the decode kernel divides the
        keys of a query. It changes the order of summation, and so the last bits; no other
        switch does.
    gqa_sharing
        Whether the query heads of one KV head share its loads in the decode kernel.
    window_skip
        Whether KV blocks outside a sliding window are skipped. If not, they are read and masked.
    tile_threshold
        A batch whose longest query has at least this many tokens goes to the tiled kernel.

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
