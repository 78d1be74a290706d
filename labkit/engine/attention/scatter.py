"""The KV write in NumPy, for backends without a kernel of their own for it."""

from __future__ import annotations

from labkit.engine.attention import validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.metadata import AttentionMetadata


def scatter(k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata) -> None:
    """Write new keys and values to their slots; see ``AttentionBackend.write``."""
    validate.new_keys(k, v, k_pool, v_pool, meta.slot_mapping)
    kept = meta.slot_mapping >= 0
    slots = meta.slot_mapping[kept]
    for new, pool in ((k, k_pool), (v, v_pool)):
        pool[slots // meta.block_size, slots % meta.block_size] = new[kept]
