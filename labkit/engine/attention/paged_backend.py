"""What backends over paged pools share: the plan of a step, and the KV write in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import metadata, resolvers, validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.metadata import AttentionMetadata


class PagedBackend:
    """Plans with a resolver and scatters new keys and values; ``attend`` is the heir's.

    Parameters
    ----------
    resolver
        Which lookup names the sequence of each token.
    """

    def __init__(self, resolver: str = "binary_search") -> None:
        self._resolver = resolvers.create(resolver)

    def plan(
        self,
        *,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        cu_seqlens_q: NDArray[np.int32],
        block_size: int,
        total_q: int | None = None,
    ) -> AttentionMetadata:
        """Check a step's batch; see ``AttentionBackend.plan``."""
        return metadata.build(
            self._resolver,
            block_tables=block_tables,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            block_size=block_size,
            total_q=total_q,
        )

    def write(
        self, k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata
    ) -> None:
        """Scatter new keys and values; see ``AttentionBackend.write``."""
        validate.new_keys(k, v, k_pool, v_pool, meta.slot_mapping)
        kept = meta.slot_mapping >= 0
        slots = meta.slot_mapping[kept]
        for new, pool in ((k, k_pool), (v, v_pool)):
            pool[slots // meta.block_size, slots % meta.block_size] = new[kept]
