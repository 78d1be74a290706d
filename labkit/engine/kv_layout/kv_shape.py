"""The shape of what one layer caches per token."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cpu.kv_dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer caches per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the bytes of one token's key and value, kept as ``dtype``."""
        return ITEM_BYTES[dtype] * self.num_kv_heads * (self.key_dim + self.value_dim)
