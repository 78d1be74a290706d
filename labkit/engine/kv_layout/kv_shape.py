"""The keys and values that one layer caches per token."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cpu.kv_dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class KVShape:
    """The heads and head dimensions of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of one token's keys and values, stored as ``dtype``."""
        return ITEM_BYTES[dtype] * self.num_kv_heads * (self.key_dim + self.value_dim)
