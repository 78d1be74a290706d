"""The small protocol that every attention backend implements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.report import LaunchReport

Array = NDArray[Any]


class AttentionBackend(Protocol):
    """Plan once per step, then write and attend once per layer."""

    name: str

    def plan(
        self,
        *,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        cu_seqlens_q: NDArray[np.int32],
        block_size: int,
        total_q: int | None = None,
    ) -> AttentionMetadata:
        """Check a step's batch and build what its layers share.

        Parameters
        ----------
        block_tables
            int32 [num_seqs, max_blocks], padded with 0.
        seq_lens
            int32 [num_seqs], context including the new tokens.
        cu_seqlens_q
            int32 [num_seqs + 1], prefix sums of the query lengths.
        block_size
            Tokens in a KV block.
        total_q
            Packed query tokens; None: ``cu_seqlens_q[-1]``.

        Raises
        ------
        ValueError
            One line that says what is wrong.
        """

    def write(
        self, k: Array, v: Array, k_pool: Array, v_pool: Array, meta: AttentionMetadata
    ) -> None:
        """Scatter new keys and values into the pools by ``meta.slot_mapping``.

        Parameters
        ----------
        k, v
            [total_q, num_kv_heads, head_dim], the pools' dtype.
        k_pool, v_pool
            [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        """

    def attend(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, LaunchReport]:
        """Attend from ``q`` [total_q, num_q_heads, head_dim] to the cached keys.

        Parameters
        ----------
        scale
            Factor of the logits.
        window
            Only the last so many keys, the query's own included; None: all.
        softcap
            ``c``: logits become ``c * tanh(logit * scale / c)``; None: off.
        sinks
            [num_q_heads], one more logit per head in the softmax denominator, unscaled.
        out
            Where to write, shaped and typed as ``q``; None: a new array.

        Returns
        -------
        tuple
            The output, shaped as ``q``, and the launch's report.

        Raises
        ------
        ValueError
            One line that says what is wrong; nothing was launched.
        """
