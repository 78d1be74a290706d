"""Requests of stated lengths and uniform random token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.prompts import Prompt, first

SEED = 0


class RandomIds:
    """The first ``workload.num_requests`` of a fixed list of (prompt, output) lengths.

    The ids are drawn from seed 0, whatever ``seed`` is, so that figures may be compared
    from one machine and one version to the next.
    """

    def __init__(self, kind: str, lengths: Sequence[tuple[int, int]]) -> None:
        self._kind = kind
        self._lengths = tuple(lengths)

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts."""
        return {"kind": self._kind, "lengths": [list(pair) for pair in self.lengths(experiment)]}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Draw them below the model's vocabulary size."""
        rng = np.random.default_rng(SEED)
        return tuple(
            Prompt(f"r{index:03d}", tuple(rng.integers(0, model.vocab_size, p).tolist()), o)
            for index, (p, o) in enumerate(self.lengths(experiment))
        )

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Return the exact lengths."""
        return first(experiment, self._lengths)
