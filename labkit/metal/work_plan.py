"""The host's work plan: which sequence and first row each threadgroup works on.

Every entry is work, so the grid has no surplus; the longest walks come first, so that no
core is left with a long one at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def work_plan(
    cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], rows: int
) -> NDArray[np.int32]:
    """Return int32 [units, 2]: sequence and first row of every unit of ``rows`` rows.

    Parameters
    ----------
    cu_seqlens_q
        int32 [num_seqs + 1].
    seq_lens
        int32 [num_seqs], context including the new tokens.
    rows
        1 for the decode kernel, ``BQ`` for the tiled one.
    """
    lengths = np.diff(cu_seqlens_q)
    units = -(-lengths // rows)
    sequence = np.repeat(np.arange(len(units)), units)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(units) - units, units)) * rows
    last = np.minimum(first + rows, lengths[sequence])
    keys = seq_lens[sequence] - lengths[sequence] + last
    order = np.argsort(-keys, kind="stable")
    return np.stack([sequence, first], axis=1)[order].astype(np.int32)
