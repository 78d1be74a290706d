"""Prefix caches: none, hash or radix; the contract is in ``base``."""

from __future__ import annotations

from labkit.engine.prefix_cache.base import PrefixCache
from labkit.engine.prefix_cache.none import NoPrefixCache

__all__ = ["NoPrefixCache", "PrefixCache"]
