"""Eight questions whose answers are of very different lengths: who waits for whom?

Source: the latency demo of "Inference Engines 2/N: Batching and PagedAttention": its
questions in its order, and an eighth of the steps that its answers took (2 to 1,592
there). Each question is also a case of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.chat import BYTES_PER_TOKEN
from labkit.workload.prompts import Prompt, first
from labkit.workload.requests import RequestKind

QUESTIONS = (
    ("What is the capital of France?", 2),
    ("Explain in detail how the attention mechanism works in a transformer.", 159),
    ("Is Python interpreted or compiled? Answer in one sentence.", 3),
    ("Write a short story about a robot who learns to paint.", 55),
    ("What is 2 + 2?", 3),
    ("Describe the history of the Roman Empire in significant detail.", 199),
    ("Name one fruit.", 2),
    ("What are the key differences between supervised and unsupervised learning?", 114),
)


class WasteSource:
    """The first ``workload.num_requests`` of the eight; a request's id is its question."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts; the questions by their digest."""
        digest = hashlib.sha256(repr(QUESTIONS).encode()).hexdigest()
        return {"kind": "waste", "questions": digest, "num_requests": len(_asked(experiment))}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise with the model's own tokenizer."""
        from labkit.models import tokenizer

        encode = tokenizer.load(model.path).encode
        asked = _asked(experiment)
        return tuple(Prompt(text, tuple(encode(text)), output) for text, output in asked)

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Guess prompt tokens from the bytes."""
        asked = _asked(experiment)
        return [(1 + len(text.encode()) // BYTES_PER_TOKEN, output) for text, output in asked]


def _asked(experiment: Experiment) -> Sequence[tuple[str, int]]:
    return first(experiment, QUESTIONS, "questions")


KIND = RequestKind(WasteSource(), per_request=True)
