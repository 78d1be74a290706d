"""Paged attention over sequences of different lengths: one operation, several backends.

Importing this package imports neither MLX nor numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.engine.attention.backend_factory import create, create_from_config

if TYPE_CHECKING:
    from labkit.engine.attention.standalone_paged_attention import paged_attention

__all__ = ["create", "create_from_config", "paged_attention"]


def __getattr__(name: str) -> Any:
    if name == "paged_attention":
        from labkit.engine.attention.standalone_paged_attention import paged_attention

        return paged_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
