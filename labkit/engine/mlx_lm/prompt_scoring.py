"""Log probabilities of prompts with mlx_lm's model: plain forwards of prompts of equal length.

``BatchGenerator`` returns no log probabilities of prompts. mlx_lm's own evaluation calls the model
in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from labkit.engine.engine_protocol import PromptLogprobs
from labkit.engine.request import Request
from labkit.engine.sampling.prompt_logprobs import concatenate, score_rows

MAX_ROWS = 256  # of logits at once, as in labkit's engines


def score_prompts(model: Any, requests: Sequence[Request]) -> list[tuple[PromptLogprobs, int]]:
    """Return each prompt's log probabilities and the greedy token that follows it.

    The prompts have the same length and are computed as one batch. Raises ``InvalidLogitsError`` if
    a row of logits has a NaN, or nothing but infinities.
    """
    tokens = np.array([request.prompt_token_ids for request in requests], np.int32)
    length, cache = tokens.shape[1], make_prompt_cache(model)
    columns = max(1, MAX_ROWS // len(requests))
    parts: list[list[PromptLogprobs]] = [[] for _ in requests]
    logits = np.zeros((len(requests), 0, 0), np.float32)
    for start in range(0, length, columns):
        outputs = model(mx.array(tokens[:, start : start + columns]), cache=cache)
        logits = np.array(outputs.astype(mx.float32))
        stop = min(start + columns, length - 1)
        for row, request in enumerate(requests):
            params = request.params
            ids = params.prompt_logprob_ids
            scored = score_rows(
                logits[row, : stop - start],
                tokens[row, start + 1 : stop + 1],
                params.prompt_logprobs or 0,
                None if ids is None else ids[start:stop],
            ) if stop > start else None  # fmt: skip
            parts[row] += [] if scored is None else [scored]
    return [
        (concatenate(of_prompt), int(last.argmax()))
        for of_prompt, last in zip(parts, logits[:, -1], strict=True)
    ]
