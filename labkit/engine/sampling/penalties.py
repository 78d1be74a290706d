"""What changes a row of logits before a token is chosen: bias and penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.engine.request import SamplingParams

Logits = NDArray[np.float32]


def adjust(
    logits: Logits, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> Logits:
    """Return a row [vocabulary] with bias and penalties applied; ``logits`` stays as it is.

    Bias, then repetition over prompt and output, then frequency and presence over the
    output. The tokens are counted anew each time (50 us per 1,000): a count kept beside
    the request would have to follow preemption and rejected drafts.
    """
    if not params.adjusts:
        return logits
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(token_ids))
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    if params.frequency_penalty or params.presence_penalty:
        output = np.asarray(token_ids[num_prompt_tokens:], np.intp)
        used, counts = np.unique(output, return_counts=True)
        logits[used] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[used] -= np.float32(params.presence_penalty)
    return logits
