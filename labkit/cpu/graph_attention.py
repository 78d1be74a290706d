"""What a replay is given for the attention launches of its graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.address_views import struct_at

# One attention launch, with the KV pools that the launch before it stores new keys and values in.
LAUNCH = np.dtype(
    [
        ("body", np.int64),  # address of ``decode_attention``'s compiled body
        ("params", np.int64),  # address of its parameters, of ``kernel_params.PARAMS_DTYPES``
        ("kind", np.int64),  # number of the layer's kind: layers of one kind are launched alike
        ("num_kv_heads", np.int64),
        ("kv_heads_per_unit", np.int64),
        ("pool_dtype", np.int64),  # index into ``attention_launch.POOL_DTYPES``
        ("token_numbers", np.int64),  # numbers in the keys of one token
        ("k_pool", np.int64),
        ("v_pool", np.int64),
    ]
)
# What the launches on layers of one kind left.
SUMMARY = np.dtype(
    [
        ("expected_stamp", np.int64),  # of ``launch``
        ("launch", np.int64),  # the first whose stamp is wrong, or else the first
        ("stamp_error", np.int64),  # by how much its stamp is off, modulo 2**32
        # Counters, added up until somebody sets them to 0.
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
        The number of the first launch, and the stamp that it must leave; those of the next
        launches count on from there.
    scratch, cu_seqlens_q, seq_lens
        As in ``attention_launch.AttentionLaunch``.
    launches
        Address of an array of ``LAUNCH``, one for each launch.
    summaries, num_kinds
        Address and length of an array of ``SUMMARY``, one for each kind of layers; overwritten.
    counters
        int64 [launches, workers + 1, ``COUNTER_COLUMNS``]: each as in ``AttentionLaunch``.
    block_tables, block_size
        int32 [sequences, max_blocks]: the blocks of each sequence, of ``block_size`` tokens each.
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
