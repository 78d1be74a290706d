"""One layer as a backend is told of it: what does not change from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.engine.attention.spec import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Layer:
    """A bound layer; layers of one ``kind`` are launched alike.

    Parameters
    ----------
    index
        Which layer's pools.
    kind
        Number of what the layers have in common: all but ``index`` and ``sinks``.
    num_heads, num_kv_heads, head_dim, block_size
        Query heads, KV heads, their size, and tokens in a KV block.
    dtype
        Of the pools: ``float32``, ``float16``, ``bfloat16`` (the reference: ``float64``).
    query_dtype
        Of queries, new keys and values; None: any, converted to the pools'.
    scale
        Factor of the logits.
    window
        Only the last so many keys, the query's own included; None: all.
    softcap
        ``c``: logits become ``c * tanh(logit * scale / c)``; None: off.
    sinks
        [num_heads], one more logit per head in the softmax denominator, unscaled; in the
        backend's kind of array. None: off.
    """

    index: int
    kind: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    query_dtype: str | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Any

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of a key or value in the pools."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def query_bytes(self) -> int:
        """Bytes of one head of a query."""
        return self.head_dim * ITEM_BYTES[self.query_dtype or self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV head's keys and values in a block."""
        return 2 * self.block_size * self.row_bytes
