"""How likely the model found the token that was chosen, and the likeliest ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import Logprobs
from labkit.engine.sampling.candidates import largest


def logprobs(logits: NDArray[np.float32], token: int, count: int) -> Logprobs:
    """Return natural logarithms of the softmax of one row [vocabulary], in float64.

    The row is the model's own, before bias, penalties and temperature.
    """
    lead = logits.astype(np.float64) - float(logits.max())
    values = lead - np.log(np.exp(lead).sum())
    top = largest(logits, count).tolist() if count else []
    return Logprobs(float(values[token]), tuple((i, float(values[i])) for i in top))
