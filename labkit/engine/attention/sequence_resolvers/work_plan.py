"""Work plan: the host lists the (sequence, first row) of every unit, most keys first.

No unit is surplus, no unit searches, and no worker starts a long unit at the end.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.sequence_resolvers.sequence_resolver import (
    Int32Array,
    Resolver,
    has_prefill,
    units_of,
)
from labkit.kernel_constants import BQ


class WorkPlanLookup(NamedTuple):
    """The lookup: two arrays int32 [units, 2], for units of one token and for Q-blocks.

    ``qblocks`` is empty in a batch without prefill, which never runs the tiled kernel.
    """

    tokens: Int32Array
    qblocks: Int32Array


class WorkPlanResolver(Resolver):
    """Builds with NumPy the plans that a batch needs."""

    variant = "work_plan"
    lookup_type = WorkPlanLookup

    def lookup(
        self, cu_seqlens_q: Int32Array, seq_lens: Int32Array
    ) -> tuple[WorkPlanLookup, float]:
        start = time.perf_counter()
        qblocks = (
            work_plan(cu_seqlens_q, seq_lens, BQ)
            if has_prefill(cu_seqlens_q)
            else np.empty((0, 2), np.int32)
        )
        plan = WorkPlanLookup(work_plan(cu_seqlens_q, seq_lens, 1), qblocks)
        return plan, (time.perf_counter() - start) * 1e6

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        sequence = int(lookup.tokens[unit, 0])
        return sequence, cu[sequence] + lookup.tokens[unit, 1], 0

    @staticmethod
    def find_qblock(lookup: Any, unit: int, cu: Any) -> Any:
        return lookup.qblocks[unit, 0], lookup.qblocks[unit, 1], 0

    @staticmethod
    def token_units(lookup: Any, cu: Any) -> int:
        return len(lookup.tokens)

    @staticmethod
    def qblock_units(lookup: Any, cu: Any) -> int:
        return len(lookup.qblocks)

    def metal_operand(self, lookup: Any, tiled: bool) -> Int32Array:
        return lookup.qblocks if tiled else lookup.tokens  # type: ignore[no-any-return]

    def dependent_loads(self, iterations: int, units: int) -> int:
        return units


def work_plan(cu_seqlens_q: Int32Array, seq_lens: Int32Array, rows: int) -> Int32Array:
    """Return int32 [units, 2]: the sequence and the first row of every unit of ``rows`` rows."""
    lengths = np.diff(cu_seqlens_q)
    sequence, first = units_of(lengths, rows)
    last = np.minimum(first + rows, lengths[sequence])
    keys = seq_lens[sequence] - lengths[sequence] + last
    order = np.argsort(-keys, kind="stable")
    return np.stack([sequence, first], axis=1)[order].astype(np.int32)
