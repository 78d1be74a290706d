"""Log probabilities of a prompt's tokens, computed from the logits of the steps that prefill it.

Row i of a prompt gives the log probabilities of token i + 1. The scheduler limits the rows that one
step scores to ``MAX_SCORED_ROWS``, so the logits of a long prompt are never all in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import InvalidLogitsError, PromptLogprobs
from labkit.engine.request import ScoredRows
from labkit.engine.sampling.sampler import top_ids
from labkit.engine.sampling.step_logits import Logits, Rows

# Rows per pass, so that the temporary arrays [rows, vocabulary] fit the CPU's cache.
ROWS_PER_PASS = 32


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The log probabilities of the prompt tokens from index ``start + 1`` on."""

    start: int
    logprobs: PromptLogprobs


def score_step(
    logits: Logits, num_sampling: int, scored: Sequence[ScoredRows]
) -> dict[str, ScoredPart]:
    """Return the log probabilities of the prompt tokens that a step scores, by request id.

    ``logits`` begins with the ``num_sampling`` rows from which tokens are sampled. The rows of
    ``scored`` follow in order. Raises ``InvalidLogitsError`` if a scored row has a NaN, or nothing
    but infinities.
    """
    parts, row = {}, num_sampling
    for state, start, count in scored:
        rows: Any = logits[row : row + count]
        params = state.request.params
        tokens = np.asarray(state.token_ids[start + 1 : start + 1 + count])
        scored_ids = params.prompt_logprob_ids
        try:
            logprobs = score_rows(
                rows,
                tokens,
                params.prompt_logprobs or 0,
                None if scored_ids is None else scored_ids[start : start + count],
            )
        except InvalidLogitsError as error:
            raise InvalidLogitsError(f"request {state.request_id}: {error}") from None
        parts[state.request_id] = ScoredPart(start, logprobs)
        row += count
    return parts


def score_rows(
    logits: Rows, tokens: NDArray[Any], top: int, ids: NDArray[Any] | None = None
) -> PromptLogprobs:
    """Return the log probabilities of ``tokens`` [rows] under ``logits`` [rows, vocabulary].

    ``logits``: the model's own logits, float32. ``tokens``: the token that follows each row.
    ``top``: the number of likeliest tokens to return per row. ``ids``: further token ids per row
    whose log probabilities are returned, [rows, m] (None: none). Raises ``InvalidLogitsError`` if a
    row has a NaN, or nothing but infinities.
    """
    if ids is None:
        ids = np.zeros((len(tokens), 0), np.int32)
    passes = [
        _score_pass(logits[i:stop], tokens[i:stop], top, ids[i:stop])
        for i in range(0, len(tokens), ROWS_PER_PASS)
        for stop in (i + ROWS_PER_PASS,)
    ]
    return concatenate(passes)


def _score_pass(logits: Rows, tokens: NDArray[Any], top: int, ids: NDArray[Any]) -> PromptLogprobs:
    peaks = logits.max(axis=1, keepdims=True)
    # float32 exponentials, added in float64: the error of the sum stays below 1e-6.
    sums = np.exp(logits - peaks).sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        raise InvalidLogitsError("the logits of a prompt token are not finite numbers")
    normalisers = peaks[:, 0].astype(np.float64) + np.log(sums)
    rows = np.arange(len(tokens))[:, None]

    def logprobs_of(columns: NDArray[Any]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = logits[rows, columns].astype(np.float64)
        values -= normalisers[:, None]
        return values

    likeliest = _top_ids(logits, top)
    return PromptLogprobs(
        logprobs_of(tokens[:, None])[:, 0], likeliest, logprobs_of(likeliest), logprobs_of(ids)
    )


def _top_ids(logits: Rows, count: int) -> NDArray[np.int32]:
    """Return the ids of each row's ``count`` largest logits, largest first, equal logits by id."""
    count = min(count, logits.shape[1])
    if count == 1:
        best: NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
        return best[:, None]
    result = np.empty((len(logits), count), np.int32)
    for row, values in enumerate(logits if count else ()):
        result[row] = top_ids(values, count)
    return result


def concatenate(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Join the log probabilities of consecutive parts of a prompt."""
    return PromptLogprobs(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top for part in parts]),
        np.concatenate([part.scored for part in parts]),
    )
