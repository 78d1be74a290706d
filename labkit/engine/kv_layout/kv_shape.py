"""The arrays that one layer caches: keys and values of a token, or the states of a request."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from labkit.cpu.kv_dtypes import ITEM_BYTES

STATE_ITEM_BYTES = {**ITEM_BYTES, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The heads and head dimensions of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of one token's keys and values, stored as ``dtype``."""
        return ITEM_BYTES[dtype] * self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The arrays of one request's recurrent or convolution state in one layer.

    ``shapes`` has no axis for requests. ``dtypes`` are named as in MLX.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one request's state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * STATE_ITEM_BYTES[dtype] for shape, dtype in pairs)
