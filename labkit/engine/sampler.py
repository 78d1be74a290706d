"""From logits to tokens, each request by its own parameters and its own random stream.

In this order, as vLLM and mlx_lm have it: bias, penalties (repetition, frequency,
presence), what a constraint allows; then greedy takes the best, or temperature, top-k,
top-p and min-p leave candidates, of which one uniform number picks one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.device_logits import Logits, Rows
from labkit.engine.engine_protocol import InvalidLogitsError, Logprobs
from labkit.engine.request import RequestState, SamplingParams

Ids = NDArray[np.intp]


class Sampled(NamedTuple):
    """A token; ``margin`` is its logit's lead over the next best, None if drawn."""

    token: int
    margin: float | None
    logprobs: Logprobs | None = None


class Sampler:
    """Chooses a token per row. A plain greedy row costs its part of one argmax.

    What a request gets is a function of its row, its parameters and its own tokens, so it
    is the same whatever the request is batched with.
    """

    def __call__(self, logits: Logits, states: Sequence[RequestState]) -> list[Sampled]:
        """Choose a token for each state from its row of ``logits``.

        ``logits``: float32 [rows, vocabulary], NumPy's (writable) or the device's; rows after
        the last state are padding.

        Raises
        ------
        InvalidLogitsError
            A row holds a NaN, or nothing but infinities.
        """
        if isinstance(logits, np.ndarray):
            best, leads = greedy(logits[: len(states)])
            tokens, margins = best.tolist(), leads.tolist()
        else:
            tokens, margins = logits.greedy()
        sampled = []
        for row, state in enumerate(states):
            if math.isnan(margins[row]):
                raise _broken(states, margins)
            plain = state.request.params.plain
            sampled.append(
                Sampled(tokens[row], margins[row]) if plain else choose(logits[row], state)
            )
        return sampled


def _broken(states: Sequence[RequestState], margins: Sequence[float]) -> InvalidLogitsError:
    pairs = zip(states, margins, strict=False)  # of padding there are margins too
    names = [state.request_id for state, margin in pairs if math.isnan(margin)]
    return InvalidLogitsError(f"logits are not numbers for request {', '.join(names)}")


def greedy(logits: Rows) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return each row's best token (the lowest id of equals) and its lead over the next.

    NumPy's argmax is vectorised and propagates NaN into the lead; two passes of it cost
    a quarter of a numba kernel that finds both in one (16 rows of 16,384, two threads).
    The logits are changed and restored on the way.
    """
    rows = np.arange(len(logits))
    best = logits.argmax(axis=1)
    top = logits[rows, best]
    logits[rows, best] = -np.inf
    margins = top - logits.max(axis=1)
    logits[rows, best] = top
    return best, margins


def choose(logits: Rows, state: RequestState) -> Sampled:
    """Choose the token after a request's last one from its row [vocabulary]."""
    params = state.request.params
    adjusted = adjust(logits, params, state.token_ids, state.num_prompt_tokens)
    if params.greedy:
        (best,), (lead,) = greedy(adjusted[None])
        token, margin = int(best), float(lead)
    else:
        uniform = draw(request_seed(state), state.num_tokens)
        token, margin = candidates(adjusted, params).pick(uniform), None
    told = None if params.logprobs is None else logprobs(logits, token, params.logprobs)
    return Sampled(token, margin, told)


def request_seed(state: RequestState) -> int:
    """Return the request's seed: its own, else one derived from its id."""
    seed = state.request.params.seed
    if seed is not None:
        return seed
    digest = hashlib.blake2b(state.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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


def candidates(logits: Rows, params: SamplingParams) -> Candidates:
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


def largest(logits: Rows, count: int) -> Ids:
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
    logits: Rows, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> Rows:
    """Return a row [vocabulary] as the parameters change it; ``logits`` stays as it is.

    Bias, then repetition over prompt and output, then frequency and presence over the
    output, then minus infinity for what the constraint does not allow. The tokens are
    counted anew each time (50 us per 1,000): a count kept beside the request would have to
    follow preemption and rejected drafts.
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
    if params.constraint is not None:
        allowed = params.constraint.allowed(token_ids[num_prompt_tokens:], len(logits))
        logits[~allowed] = -np.inf
    return logits


def logprobs(logits: Rows, token: int, count: int) -> Logprobs:
    """Return natural logarithms of the softmax of one row [vocabulary], in float64.

    The row is the model's own, before bias, penalties and temperature.
    """
    lead = logits.astype(np.float64) - float(logits.max())
    values = lead - np.log(np.exp(lead).sum())
    top = largest(logits, count).tolist() if count else []
    return Logprobs(float(values[token]), tuple((i, float(values[i])) for i in top))
