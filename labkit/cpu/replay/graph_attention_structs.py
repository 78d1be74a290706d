"""The attention launches of a replayed graph: inputs, summaries, and the check of their stamps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime.address_intrinsics import struct_at
from labkit.cpu.runtime.jit import inner
from labkit.kernel_constants import (
    BLOCKS_COLUMN,
    ITERATIONS_COLUMN,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)

# One attention launch, and the KV pools into which the preceding STORE_KV launch writes new keys
# and values.
LAUNCH = np.dtype(
    [
        ("body", np.int64),  # address of ``decode_attention_kernel``'s compiled body
        ("params", np.int64),  # address of a struct of ``attention_params.PARAMS_DTYPES``
        ("kind", np.int64),  # index of the layer's kind; layers of a kind have equal launches
        ("num_q_heads", np.int64),
        ("heads_per_unit", np.int64),
        ("pool_dtype", np.int64),  # index into ``kernel_entry_points.POOL_DTYPES``
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

    Fields without a comment are as in ``kernel_entry_points.AttentionLaunch``.
    """

    nonce: int  # the first launch's; it increases by 1 from one launch to the next
    stamp: int  # the first launch's expected one; it increases by ``STAMP_FACTORS[0]``
    launches: int  # address of an array with one ``LAUNCH`` per attention launch
    summaries: int  # address of an array with one ``SUMMARY`` per kind of layer
    num_kinds: int  # its length; a replay updates the summaries
    scratch: NDArray[Any]
    counters: NDArray[Any]  # int64 [launches, workers + 1, ``COUNTER_COLUMNS``], per launch
    block_tables: NDArray[Any]  # int32 [sequences, max_blocks]: the KV blocks of each sequence
    block_size: int  # tokens per block
    cu_seqlens_q: NDArray[Any]
    seq_lens: NDArray[Any]


@inner
def audit_launches(attention: AttentionInputs) -> int:
    """Fill ``attention.summaries`` and return the number of launches with a wrong stamp.

    Each kind of layer has one summary, with its first wrong stamp and the sums of its counters.
    """
    counters, num_wrong = attention.counters, 0
    for kind in range(attention.num_kinds):
        summary = summary_at(attention.summaries + kind * SUMMARY_BYTES)
        summary.launch, summary.stamp_error = -1, 0
    for i in range(len(counters)):
        kind = launch_at(attention.launches + i * LAUNCH_BYTES).kind
        summary = summary_at(attention.summaries + kind * SUMMARY_BYTES)
        expected = (attention.stamp + i * STAMP_FACTORS[0]) & STAMP_MASK
        error = 0
        for worker in range(counters.shape[1] - 1):
            if error == 0:
                error = (counters[i, worker, STAMP_COLUMN] - worker - expected) & STAMP_MASK
            summary.iterations += counters[i, worker, ITERATIONS_COLUMN]
            summary.blocks += counters[i, worker, BLOCKS_COLUMN]
            summary.surplus += counters[i, worker, SURPLUS_COLUMN]
        num_wrong += error != 0
        if summary.launch < 0 or (error != 0 and summary.stamp_error == 0):
            summary.expected_stamp, summary.launch, summary.stamp_error = expected, i, error
    return num_wrong
