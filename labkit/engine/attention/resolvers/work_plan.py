"""Work plan: the host lists (sequence, first row) for every unit, the longest walks first.

No unit is surplus, nothing is searched, and no worker is left with a long walk at the end.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.metal.work_plan import work_plan


class WorkPlan(NamedTuple):
    """The lookup: int32 [units, 2] for units of one token, and of one Q-block."""

    tokens: NDArray[np.int32]
    qblocks: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]

    def sequence_of_tokens(self, total_q: int) -> NDArray[np.int64]:
        """Return the owner of every token, as planned."""
        owners = np.zeros(total_q, np.int64)
        sequences, rows = self.tokens.T
        owners[self.cu_seqlens_q[sequences] + rows] = sequences
        return owners


class WorkPlanResolver:
    """Plans with NumPy; both kernels' plans, as either may run."""

    name = "work_plan"

    def lookup(
        self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], bq: int
    ) -> tuple[WorkPlan, float]:
        """Return the lookup and the time (us) of building it."""
        start = time.perf_counter()
        tokens, qblocks = (work_plan(cu_seqlens_q, seq_lens, rows) for rows in (1, bq))
        plan = WorkPlan(tokens, qblocks, cu_seqlens_q)
        return plan, (time.perf_counter() - start) * 1e6
