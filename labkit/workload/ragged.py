"""A synthetic chat of ragged lengths: 32 requests of uniform random token ids.

The recipe is fixed, seed included, so that its numbers may be compared from one machine
and one version to the next: 10,326 prompt and 2,899 output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.prompts import Prompt, first
from labkit.workload.requests import RequestKind

NUM_REQUESTS = 32
SEED = 0


def draw(vocab_size: int) -> tuple[Prompt, ...]:
    """Draw all 32 requests: prompt lengths, output lengths, then token ids, in this order."""
    rng = np.random.default_rng(SEED)
    prompt = np.clip(rng.lognormal(log(300), 0.8, NUM_REQUESTS).astype(int), 16, 1500)
    output = np.clip(rng.lognormal(log(60), 0.7, NUM_REQUESTS).astype(int), 8, 256)
    return tuple(
        Prompt(f"r{index:03d}", tuple(rng.integers(0, vocab_size, int(p)).tolist()), int(o))
        for index, (p, o) in enumerate(zip(prompt, output, strict=True))
    )


class RaggedSource:
    """The first ``workload.num_requests`` of the 32."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts."""
        return {"kind": "ragged", "num_requests": len(first(experiment, range(NUM_REQUESTS)))}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Draw them below the model's vocabulary size."""
        return tuple(first(experiment, draw(model.vocab_size)))

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Return the exact lengths."""
        return [(len(p.token_ids), p.max_tokens) for p in first(experiment, draw(2))]


KIND = RequestKind(RaggedSource())
