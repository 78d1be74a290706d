"""MLX's own ``scaled_dot_product_attention`` between NumPy arrays, and what a call reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SdpaReport:
    """The launches of MLX's attention for one layer.

    MLX's kernel leaves no stamp; ``stale`` is always False.

    Parameters
    ----------
    launches
        Calls: one for a padded batch, one per request otherwise.
    keys
        Keys that the calls read, padding included.
    padded_keys
        Those of them that hold no token.
    bytes
        Bytes of the keys and values read, plus queries and output.
    """

    launches: int
    keys: int
    padded_keys: int
    bytes: int

    @property
    def stale(self) -> bool:
        """Tell whether the output is another launch's: it cannot be told."""
        return False

    def counters(self) -> dict[str, float]:
        """Return the launches as counters that may be summed."""
        return {
            "kernel.sdpa": self.launches,
            "attention.keys": self.keys,
            "attention.keys_padded": self.padded_keys,
            "attention.bytes": self.bytes,
        }


def attend_one(
    q: Array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None,
    sinks: Array | None,
) -> mx.array:
    """Attend for one sequence; not evaluated yet.

    Parameters
    ----------
    q
        [q_len, num_q_heads, head_dim], the sequence's last tokens.
    k, v
        [1, num_kv_heads, keys, head_dim], its last keys, the new ones included.
    scale, window, sinks
        As in ``StepAttention.attend``.

    Returns
    -------
    mx.array
        [1, num_q_heads, q_len, head_dim].
    """
    return mx.fast.scaled_dot_product_attention(
        heads_first(q[None]),
        k,
        v,
        scale=scale,
        mask=_mask_of_one(len(q), k.shape[2], window),
        sinks=None if sinks is None else mx.array(sinks),
    )


def heads_first(tokens: Array) -> mx.array:
    """Copy [rows, tokens, heads, dim] into an MLX array [rows, heads, tokens, dim]."""
    return mx.array(tokens.transpose(0, 2, 1, 3))


def _mask_of_one(q_len: int, keys: int, window: int | None) -> mx.array | str | None:
    """Return the mask that mlx_lm would give: none for one token, else a name or an array."""
    if window is not None and keys > window:
        columns, seen = np.arange(keys), np.arange(keys - q_len, keys)[:, None]
        return mx.array((columns <= seen) & (columns > seen - window))
    return "causal" if q_len > 1 else None
