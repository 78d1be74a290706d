"""The inputs and the summaries of the attention launches in a replayed graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime.address_views import struct_at

# One attention launch, and the KV pools into which the preceding STORE_KV launch writes new keys
# and values.
LAUNCH = np.dtype(
    [
        ("body", np.int64),  # address of ``decode_attention``'s compiled body
        ("params", np.int64),  # address of a struct of ``attention_params.PARAMS_DTYPES``
        ("kind", np.int64),  # index of the layer's kind; layers of a kind have equal launches
        ("num_q_heads", np.int64),
        ("heads_per_unit", np.int64),
        ("pool_dtype", np.int64),  # index into ``attention_launch.POOL_DTYPES``
        ("token_numbers", np.int64),  # numbers in the keys of one token
        ("k_pool", np.int64),
        ("v_pool", np.int64),
    ]
)
# The summary of the launches on layers of one kind.
SUMMARY = np.dtype(
    [
        ("expected_stamp", np.int64),  # of ``launch``
        ("launch", np.int64),  # index of the first launch with a wrong stamp, else of the first one
        ("stamp_error", np.int64),  # actual minus expected stamp of ``launch``, modulo 2**32
        # Sums of the launches' counters, accumulated over steps until the host resets them.
        ("iterations", np.int64),
        ("blocks", np.int64),
        ("surplus", np.int64),
    ]
)
LAUNCH_BYTES, SUMMARY_BYTES = LAUNCH.itemsize, SUMMARY.itemsize

launch_at = struct_at("AttentionLaunch", LAUNCH)
summary_at = struct_at("AttentionSummary", SUMMARY)


class AttentionInputs(NamedTuple):
    """A step's inputs to the attention launches of a graph.

    Parameters
    ----------
    nonce, stamp
        The first launch's nonce and expected stamp. The nonce increases by 1 from one launch to
        the next, the stamp by ``STAMP_FACTORS[0]``.
    scratch, cu_seqlens_q, seq_lens
        As in ``attention_launch.AttentionLaunch``.
    launches
        Address of an array with one ``LAUNCH`` per attention launch.
    summaries, num_kinds
        Address and length of an array with one ``SUMMARY`` per kind of layer, which a replay
        updates.
    counters
        int64 [launches, workers + 1, ``COUNTER_COLUMNS``]: ``AttentionLaunch.counters`` per launch.
    block_tables, block_size
        int32 [sequences, max_blocks]: the KV blocks of each sequence, and the tokens per block.
    """

    nonce: int
    stamp: int
    launches: int
    summaries: int
    num_kinds: int
    scratch: NDArray[Any]
    counters: NDArray[Any]
    block_tables: NDArray[Any]
    block_size: int
    cu_seqlens_q: NDArray[Any]
    seq_lens: NDArray[Any]
