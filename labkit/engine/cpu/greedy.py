"""The greedy token of each row of logits, and how sure it was."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array = NDArray[np.float32]

CHUNK = 1024


# "nnan" is left out on purpose: a NaN must be found, not assumed away.
@njit(
    "void(float32[:, ::1], int32[::1], float32[::1])",
    parallel=True,
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"reassoc", "nsz"},
)
def _top2(logits, tokens, margins):  # type: ignore[no-untyped-def]
    rows, width = logits.shape
    chunks = (width + CHUNK - 1) // CHUNK
    for row in prange(rows):
        x = logits[row]
        best = second = np.float32(-np.inf)
        where = np.int32(0)
        bad = np.int32(0)
        for chunk in range(chunks):
            start = chunk * CHUNK
            end = min(start + CHUNK, width)
            peak = np.float32(-np.inf)
            for i in range(start, end):
                peak = x[i] if x[i] > peak else peak
            for i in range(start, end):
                bad += np.int32(x[i] != x[i])
            if peak > second:
                for i in range(start, end):
                    if x[i] > best:
                        second = best
                        best = x[i]
                        where = np.int32(i)
                    elif x[i] > second:
                        second = x[i]
        tokens[row] = where
        margins[row] = np.float32(np.nan) if bad > 0 else best - second


def argmax(logits: Array) -> tuple[NDArray[np.int32], Array]:
    """Return the first largest entry of each row, and its lead over the next.

    Parameters
    ----------
    logits
        float32 [rows, vocabulary].

    Returns
    -------
    tuple
        Tokens int32 [rows] and margins float32 [rows]: 0 for a tie, NaN for a row that
        holds a NaN (its token means nothing).
    """
    logits = np.ascontiguousarray(logits)
    tokens = np.empty(len(logits), np.int32)
    margins = np.empty(len(logits), np.float32)
    _top2(logits, tokens, margins)
    return tokens, margins
