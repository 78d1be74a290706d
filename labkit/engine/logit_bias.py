"""The biases that a request adds to logits: one immutable object for all its choices and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class LogitBias(Mapping[int, float]):
    """By token id, the number that is added to the token's logit.

    ``bias`` must be valid: ids of 0 or more, finite numbers.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __repr__(self) -> str:
        return repr(self._bias)

    @cached_property
    def token_ids(self) -> NDArray[np.intp]:
        """The ids, each once."""
        return np.fromiter(self._bias, np.intp, len(self._bias))

    @cached_property
    def added_logits(self) -> NDArray[np.float32]:
        """What is added to the logits of ``token_ids``."""
        values = np.fromiter(self._bias.values(), np.float64, len(self._bias))
        with np.errstate(over="ignore"):  # the sampler refuses infinite logits
            return values.astype(np.float32)


NO_BIAS = LogitBias({})
