"""The arrays that one layer caches: keys and values of a token, or the states of a request."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from labkit.cpu.precision.kv_dtypes import ITEM_BYTES, QUANTIZED_BITS, row_bytes

STATE_ITEM_BYTES = {**ITEM_BYTES, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The heads and head dimensions of one layer's keys and values.

    With ``latent``, values are not stored: the value of a token is the first ``value_dim`` elements
    of its key (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    def __post_init__(self) -> None:
        if self.latent and self.value_dim > self.key_dim:
            raise ValueError(
                f"value_dim={self.value_dim} is more than key_dim={self.key_dim}, but a latent "
                "layer's values are a part of its keys"
            )

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The dimensions per head of each stored array: the keys and, if stored, the values."""
        return (self.key_dim,) if self.latent else (self.key_dim, self.value_dim)

    def token_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of one token's keys and values, stored as ``dtype``.

        Scales and biases of quantised keys and values are included. Raises ``ValueError`` for a
        quantised ``dtype`` if a head is not a whole number of groups, or if the layer is latent.
        """
        if self.latent and dtype in QUANTIZED_BITS:
            raise ValueError(
                f"the keys of a latent layer cannot be {dtype}; set engine.kv.dtype=float32"
            )
        return self.num_kv_heads * sum(row_bytes(dtype, dim) for dim in self.stored_dims)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The arrays, in MLX's dtypes, of a request's recurrent or convolution state in a layer."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * STATE_ITEM_BYTES[dtype] for shape, dtype in pairs)
