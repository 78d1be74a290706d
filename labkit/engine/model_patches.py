"""Replacements for the parts of mlx_lm's models that do not run over packed tokens.

Such code computes attention without ``scaled_dot_product_attention``, or expects the offset of the
cache to be one number. Called with mlx_lm's own caches, a replacement runs the original code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

Override = Callable[[Any], Any]


def softcapped_attention(original: Any) -> Any:
    """Return a replacement for an attention that applies ``attn_logit_softcapping`` itself."""

    def attend(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not takes_packed_tokens(cache):
            return original(self, x, mask, cache)
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        numbers = self.n_heads, self.n_kv_heads, self.n_kv_heads
        queries, keys, values = map(_split_heads, projected, numbers)
        queries, keys = (self.rope(array, offset=cache.offset) for array in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
        softcap = self.attn_logit_softcapping
        out = keys.attend(queries, values, self.scale, None, None, softcap)
        return self.o_proj(_join_heads(out))

    return attend


def tiled_attention(original: Any) -> Any:
    """Return a replacement for an attention with query head ``h`` on KV head ``h % kv_heads``."""

    def attend(self: Any, hidden_states: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        if not takes_packed_tokens(cache):
            return original(self, hidden_states, attention_mask, cache)
        projected = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        numbers = self.q_num_heads, self.k_num_heads, self.v_num_heads
        queries, keys, values = map(_split_heads, projected, numbers)
        queries, keys = (self.rotary_emb(array, offset=cache.offset) for array in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
        # labkit's attention expects the query heads of a KV head to be adjacent.
        out = keys.attend(_regroup(queries, self.k_num_heads), values, self.scale, None, None)
        return self.o_proj(_join_heads(_regroup(out, self.q_num_heads // self.k_num_heads)))

    return attend


def _regroup(array: Any, inner: int) -> Any:
    """Reorder heads [T, outer * inner, 1, dim] to [T, inner * outer, 1, dim]."""
    grouped = array.reshape(array.shape[0], -1, inner, 1, array.shape[3])
    return grouped.transpose(0, 2, 1, 3, 4).reshape(array.shape)


def _split_heads(array: Any, num_heads: int) -> Any:
    """Reshape [T, 1, heads * dim] to [T, heads, 1, dim]."""
    return array.reshape(array.shape[0], 1, num_heads, -1).transpose(0, 2, 1, 3)


def _join_heads(array: Any) -> Any:
    """Reshape [T, heads, 1, dim] to [T, 1, heads * dim]."""
    return array.transpose(0, 2, 1, 3).reshape(array.shape[0], 1, -1)


def arange_of_offsets(original: Any) -> Any:
    """Return a replacement for NumPy in a module that computes ``arange(offset, offset + length)``.

    Every token is a batch entry of length 1, so ``arange`` of offsets [T] returns them as positions
    [T, 1].
    """

    def arange(start: Any, stop: Any = None) -> Any:
        return original.arange(start, stop) if np.ndim(start) == 0 else start[:, None]

    return SimpleNamespace(arange=arange)


def takes_packed_tokens(cache: Any) -> bool:
    """Return whether a cache is labkit's, which takes every token as a batch entry of its own."""
    return bool(getattr(cache, "packed", False))


# By module of mlx_lm, the replacement of each name as a function of the original object. In a name
# with a dot, the part before it is a class.
OVERRIDES: Mapping[str, Mapping[str, Override]] = {
    "gemma2": {"Attention.__call__": softcapped_attention},
    "gpt_bigcode": {"np": arange_of_offsets},
    "plamo": {"Attention.__call__": tiled_attention},
}
