"""What the kernels say about themselves, read from the rows that they wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.metal.dispatch import RESOLVER_IDS
from labkit.metal.stamp import KERNEL_IDS, STAMP_MASK, launch_stamp


@dataclass(frozen=True)
class Evidence:
    """One launch, as its threadgroups reported it.

    Parameters
    ----------
    stamp, expected_stamp
        uint32; they differ where any threadgroup of any kernel left another stamp than
        its own: it did not run, or another kernel's or launch's rows are shown.
    search_iterations
        Binary-search iterations over all threadgroups.
    kv_blocks_visited
        KV blocks walked over all threadgroups.
    surplus_threadgroups
        Threadgroups that found no work.
    """

    stamp: int
    expected_stamp: int
    search_iterations: int
    kv_blocks_visited: int
    surplus_threadgroups: int


def expected_stamp(kernel: str, resolver: str, nonce: int) -> int:
    """Return the uint32 that ``kernel`` must leave for the launch ``nonce``."""
    return launch_stamp(nonce, KERNEL_IDS[kernel], RESOLVER_IDS[resolver])


def read(rows: list[tuple[str, NDArray[np.uint32]]], resolver: str, nonce: int) -> Evidence:
    """Sum up a launch.

    Parameters
    ----------
    rows
        Of each kernel that ran, in order, the main one first: its name and its report,
        uint32 [threadgroups, 4] (stamp, search iterations, KV blocks, surplus).
    resolver, nonce
        Of the launch.
    """
    main = rows[0][0]
    expected = expected_stamp(main, resolver, nonce)
    stamp = expected
    totals: Any = np.zeros(3, np.int64)
    for kernel, report in rows:
        must = expected_stamp(kernel, resolver, nonce)
        found = (report[:, 0].astype(np.int64) - np.arange(len(report))) & STAMP_MASK
        wrong = np.flatnonzero(found != must)
        if len(wrong) and stamp == expected:
            stamp = (expected + int(found[wrong[0]]) - must) & STAMP_MASK
        totals += report[:, 1:].sum(axis=0, dtype=np.int64)
    return Evidence(stamp, expected, *(int(total) for total in totals))
