"""Requests that a user writes: in the workload's own file, or as lines of another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.config import Asked, Experiment, to_plain
from labkit.workload import request_lengths
from labkit.workload.sources.text_requests import Text, Texts, plain

STREAM = 6  # of the seed


def texts(experiment: Experiment, asked: Sequence[Asked]) -> list[Text]:
    """Turn requests into texts; what does not say how long its answer is gets a drawn length."""
    prompts = experiment.workload.prompts
    seed = experiment.seed if prompts.seed is None else prompts.seed
    drawn = request_lengths.draw(prompts.output, np.random.default_rng([seed, STREAM]), len(asked))
    return [_text(one, output) for one, output in zip(asked, drawn, strict=True)]


def _text(asked: Asked, output: int) -> Text:
    messages = None if asked.messages is None else tuple(to_plain(asked.messages))
    pieces = (asked.prompt or "",) if messages is None else tuple(map(plain, messages))
    return Text(
        pieces,
        output if asked.max_tokens is None else asked.max_tokens,
        messages,
        asked.session,
        asked.timestamp,
    )


SOURCE = Texts(lambda e: texts(e, e.workload.prompts.listed), "requests")
