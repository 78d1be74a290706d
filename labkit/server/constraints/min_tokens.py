"""The constraint of ``min_tokens``: tokens that would end the output too early are forbidden."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


class MinTokensConstraint:
    """Forbids the tokens that end a request until it has ``min_tokens`` tokens.

    Implements ``labkit.engine.sampling.sampling_params.Constraint``. ``ending_ids`` are the
    end-of-text ids and the request's ``stop_token_ids``.
    """

    def __init__(self, min_tokens: int, ending_ids: Collection[int]) -> None:
        self._min_tokens = min_tokens
        self._ending_ids = list(ending_ids)

    def copy(self) -> MinTokensConstraint:
        return self

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Return a boolean mask over the vocabulary: which token ids may follow ``output``."""
        mask = np.ones(vocab_size, np.bool_)
        if len(output) < self._min_tokens:
            mask[self._ending_ids] = False
        return mask
