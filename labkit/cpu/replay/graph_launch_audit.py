"""Checks the stamps and sums the counters that a replayed step's attention launches wrote."""

from __future__ import annotations

from labkit.cpu.replay.graph_attention_structs import (
    LAUNCH_BYTES,
    SUMMARY_BYTES,
    AttentionInputs,
    launch_at,
    summary_at,
)
from labkit.cpu.runtime.jit import inner
from labkit.kernel_constants import (
    BLOCKS_COLUMN,
    ITERATIONS_COLUMN,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)


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
