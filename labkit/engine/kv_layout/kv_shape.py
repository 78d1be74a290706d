"""The keys and values that one layer caches per token."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cpu.kv_dtypes import row_bytes


@dataclass(frozen=True, slots=True)
class KVShape:
    """The heads and head dimensions of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of one token's keys and values, stored as ``dtype``.

        Scales and biases of quantised keys and values are included. ``ValueError``: the heads do
        not consist of whole groups.
        """
        return self.num_kv_heads * (
            row_bytes(dtype, self.key_dim) + row_bytes(dtype, self.value_dim)
        )
