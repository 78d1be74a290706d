"""What a cache of a NumPy forward hands to the model instead of keys and values."""

from __future__ import annotations

from typing import Any, Protocol


class AttentionHandle(Protocol):
    """New keys and values that know how to attend over their whole context.

    A layer's cache returns it from ``update_and_fetch`` as keys and as values; the model
    passes it to ``scaled_dot_product_attention``, which asks it.
    """

    def attend(self, queries: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """Return the attention output, float32 [T, heads, 1, head_dim], like ``queries``."""
