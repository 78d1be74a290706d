"""The switches of the fused attention backends, which select indexing and division of work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """How a fused backend finds the sequence of each unit, and divides work among units.

    Parameters
    ----------
    resolver
        A built-in resolver's name (``config.RESOLVERS``) or ``package.module:Class``.
    split_kv
        ``off``, ``auto`` or a number of partitions among which the decode kernel divides the
        keys of a query. Splitting changes the order of summation and thus the last bits of the
        result. No other switch changes the result.
    gqa_sharing
        Whether the query heads of a KV head share loads of keys and values in the decode kernel.
    window_skip
        Whether KV blocks outside a sliding window are skipped. False: they are read and masked.
    tile_threshold
        The tiled kernel is chosen if a sequence has at least this many query tokens.

    Raises
    ------
    ValueError
        ``split_kv`` or ``tile_threshold`` is out of range.
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
            raise ValueError(f"split_kv={text}: must be off, auto or 1 to 1024 (partitions)")
        if self.tile_threshold < 2:
            raise ValueError(
                f"tile_threshold={self.tile_threshold}: must be 2 or more (query tokens)"
            )
