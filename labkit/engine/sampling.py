"""From one row of logits to one token; see ``labkit.engine.sampler`` for the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import Logprobs
from labkit.engine.request import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids and their weights above 0: probabilities times a common factor."""

    ids: Ids
    weights: NDArray[np.float64]

    def pick(self, uniform: float) -> int:
        """Return the token at ``uniform`` in [0, 1) of the cumulative distribution."""
        cumulative = np.cumsum(self.weights)
        index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


def candidates(logits: Logits, params: SamplingParams) -> Candidates:
    """Apply temperature, top-k, top-p and min-p, in this order, to one row [vocabulary].

    Equal logits are ordered by token id, so that the result does not depend on a sort.
    """
    ids = largest(logits, params.top_k) if params.top_k else np.arange(len(logits))
    lead = logits[ids].astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        weights = np.exp(lead / params.temperature)
    if params.top_p < 1:
        order = np.argsort(-lead, kind="stable")
        cumulative = np.cumsum(weights[order])
        count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        ids, weights = ids[order[:count]], weights[order[:count]]
    kept = weights >= params.min_p if params.min_p else weights > 0
    return Candidates(ids[kept], weights[kept])


def largest(logits: Logits, count: int) -> Ids:
    """Return the ids of the ``count`` largest of a row, largest first, equals by id."""
    count = min(count, len(logits))
    bound = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def draw(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) of a position in a seed's stream.

    Counter-based (Philox; Salmon et al. 2011): any position without the ones before it.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def adjust(
    logits: Logits, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> Logits:
    """Return a row [vocabulary] with bias and penalties applied; ``logits`` stays as it is.

    Bias, then repetition over prompt and output, then frequency and presence over the
    output. The tokens are counted anew each time (50 us per 1,000): a count kept beside
    the request would have to follow preemption and rejected drafts.
    """
    if not params.adjusts:
        return logits
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(token_ids))
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    if params.frequency_penalty or params.presence_penalty:
        output = np.asarray(token_ids[num_prompt_tokens:], np.intp)
        used, counts = np.unique(output, return_counts=True)
        logits[used] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[used] -= np.float32(params.presence_penalty)
    return logits


def logprobs(logits: NDArray[np.float32], token: int, count: int) -> Logprobs:
    """Return natural logarithms of the softmax of one row [vocabulary], in float64.

    The row is the model's own, before bias, penalties and temperature.
    """
    lead = logits.astype(np.float64) - float(logits.max())
    values = lead - np.log(np.exp(lead).sum())
    top = largest(logits, count).tolist() if count else []
    return Logprobs(float(values[token]), tuple((i, float(values[i])) for i in top))
