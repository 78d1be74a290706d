"""Requests written by the user, listed in the workload's file or in a JSON-lines file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.config import Experiment, ListedRequest, to_plain
from labkit.workload import request_lengths
from labkit.workload.sources.text_requests import TextRequest, TextSource, plain

SEED_STREAM = 6  # number of this source's random stream, used together with the seed


def texts(experiment: Experiment, listed: Sequence[ListedRequest]) -> list[TextRequest]:
    """Return the listed requests, with a drawn output length if ``max_tokens`` is not set."""
    prompts = experiment.workload.prompts
    seed = experiment.seed if prompts.seed is None else prompts.seed
    drawn = request_lengths.draw(
        prompts.output, np.random.default_rng([seed, SEED_STREAM]), len(listed)
    )
    return [_text(one, output) for one, output in zip(listed, drawn, strict=True)]


def _text(listed: ListedRequest, output: int) -> TextRequest:
    messages = None if listed.messages is None else tuple(to_plain(listed.messages))
    parts = (listed.prompt or "",) if messages is None else tuple(map(plain, messages))
    return TextRequest(
        parts,
        output if listed.max_tokens is None else listed.max_tokens,
        messages,
        listed.session,
        listed.timestamp,
    )


SOURCE = TextSource(lambda e: texts(e, e.workload.prompts.listed), "requests")
