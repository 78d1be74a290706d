"""Sample a token per request from logits, with the request's own parameters and random stream.

Logit bias, penalties (repetition, frequency, presence) and the constraint change the logits, in
this order. Greedy sampling then takes the largest logit. Otherwise temperature, top-k, top-p and
min-p select candidates, and a uniform random number picks one. vLLM applies min-p before top-k and
top-p. mlx_lm applies top-p, min-p, top-k, and the temperature last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import NO_TOKEN, InvalidLogitsError, Logprobs
from labkit.engine.request import RequestState
from labkit.engine.sampling.sampling_params import SamplingError, SamplingParams
from labkit.engine.sampling.step_logits import Logits, Rows
from labkit.machine.exception_text import one_line, one_line_with_type

Ids = NDArray[np.intp]


class Sampled(NamedTuple):
    """A sampled token and its margin, or the reason that no token could be sampled.

    ``margin`` is the largest logit minus the second largest, or None if drawn at random. ``error``
    is one line if sampling failed (``token`` is ``NO_TOKEN`` then), else None.
    """

    token: int
    margin: float | None
    logprobs: Logprobs | None = None
    error: str | None = None


def sample_rows(logits: Logits, states: Sequence[RequestState]) -> list[Sampled]:
    """Return a token for each state from its row of ``logits``.

    A request's token depends on its row, its parameters and its own tokens only, never on the
    other requests of the batch. If sampling fails because of a request's own parameters or
    constraint, only this request gets a ``Sampled`` with an error.

    ``logits`` is float32 [rows, vocabulary]: a writable NumPy array, whose argmax serves all plain
    greedy rows, or an object that holds greedy tokens already (``step_logits``). Rows after the
    last state are padding. Raises ``InvalidLogitsError`` if a row has a NaN, or nothing but
    infinities.
    """
    if isinstance(logits, np.ndarray):
        best, top_margins = greedy(logits[: len(states)])
        tokens, margins = best.tolist(), top_margins.tolist()
    else:
        tokens, margins = logits.greedy()
    sampled = []
    for row, state in enumerate(states):
        if math.isnan(margins[row]):
            raise _invalid_logits(states, margins)
        plain = state.request.params.plain
        sampled.append(
            Sampled(tokens[row], margins[row]) if plain else try_sample(logits[row], state)
        )
    return sampled


def _invalid_logits(states: Sequence[RequestState], margins: Sequence[float]) -> InvalidLogitsError:
    pairs = zip(states, margins, strict=False)  # padding has margins too
    names = [state.request_id for state, margin in pairs if math.isnan(margin)]
    return InvalidLogitsError(f"the logits are not finite numbers (request {', '.join(names)})")


def greedy(logits: Rows) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return each row's token with the largest logit, and its margin over the second largest.

    Of equal logits the lowest id wins. A NaN in a row makes its margin NaN. Two passes of NumPy's
    vectorised argmax take a quarter of the time of a numba kernel with one pass (16 rows of
    16,384, two threads). ``logits`` is changed temporarily.
    """
    rows = np.arange(len(logits))
    best = logits.argmax(axis=1)
    top = logits[rows, best]
    logits[rows, best] = -np.inf
    margins = top - logits.max(axis=1)
    logits[rows, best] = top
    return best, margins


def try_sample(logits: Rows, state: RequestState) -> Sampled:
    """Return the token of ``_sample_row``, or a ``Sampled`` with the error that it raised."""
    try:
        return _sample_row(logits, state)
    except SamplingError as error:
        return Sampled(NO_TOKEN, None, error=one_line(error))
    except Exception as error:  # a constraint may be a user's class
        return Sampled(NO_TOKEN, None, error=one_line_with_type(error))


def _sample_row(logits: Rows, state: RequestState) -> Sampled:
    """Return a request's next token from its row of logits [vocabulary].

    Raises ``SamplingError`` if the request's parameters make a logit infinite, or its constraint
    allows no token.
    """
    params = state.request.params
    adjusted = apply_params(logits, params, state.token_ids, state.num_prompt_tokens)
    if params.adjusts and not math.isfinite(adjusted.max()):
        raise SamplingError(
            "no token can be sampled: the constraint allows none, or logit_bias or "
            "repetition_penalty makes a logit infinite"
        )
    if params.greedy:
        (best,), (best_margin,) = greedy(adjusted[None])
        token, margin = int(best), float(best_margin)
    else:
        uniform = _uniform_at(request_seed(state), state.num_tokens)
        token, margin = candidates(adjusted, params).pick(uniform), None
    row_logprobs = None if params.logprobs is None else _logprobs(logits, token, params.logprobs)
    return Sampled(token, margin, row_logprobs)


def request_seed(state: RequestState) -> int:
    """Return the seed in the request's parameters, or a seed derived from the request id."""
    seed = state.request.params.seed
    if seed is not None:
        return seed
    digest = hashlib.blake2b(state.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Candidates(NamedTuple):
    """Token ids that may be sampled, with unnormalised probabilities above 0."""

    ids: Ids
    weights: NDArray[np.float64]

    def pick(self, uniform: float) -> int:
        """Return the token at which the cumulative distribution exceeds ``uniform`` in [0, 1)."""
        cumulative = np.cumsum(self.weights)
        index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


def candidates(logits: Rows, params: SamplingParams) -> Candidates:
    """Apply temperature, top-k, top-p and min-p, in this order, to one row [vocabulary].

    The candidates are in the order of their ids. In the order of their logits, two that are nearly
    equal would change places with a last bit, which depends on the batch.
    """
    ids = np.sort(top_ids(logits, params.top_k)) if params.top_k else np.arange(len(logits))
    lead = logits[ids].astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        weights = np.exp(lead / params.temperature)
    if params.top_p < 1:
        order = np.argsort(-lead, kind="stable")
        cumulative = np.cumsum(weights[order])
        count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        chosen = np.zeros(len(ids), bool)
        chosen[order[:count]] = True
        ids, weights = ids[chosen], weights[chosen]
    selected = weights >= params.min_p if params.min_p else weights > 0
    return Candidates(ids[selected], weights[selected])


def top_ids(logits: Rows, count: int) -> Ids:
    """Return the ids of a row's ``count`` largest logits, largest first, equal logits by id."""
    count = min(count, len(logits))
    bound = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def _uniform_at(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) at a position of a seed's random stream.

    The generator is counter-based (Philox; Salmon et al. 2011): a number does not depend on the
    numbers at earlier positions.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def apply_params(
    logits: Rows, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> Rows:
    """Return a copy of a row [vocabulary] with bias, penalties and constraint applied.

    The order: bias, the repetition penalty over prompt and output, frequency and presence
    penalties over the output, minus infinity for tokens that the constraint forbids. The penalties
    count the tokens anew for every sample (50 us per 1,000 tokens), because a stored count would
    have to follow preemptions and rejected drafts. If the parameters change no logits, ``logits``
    itself is returned.
    """
    if not params.adjusts:
        return logits
    logits = logits.copy()
    logits[params.bias.token_ids] += params.bias.added_logits
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


def _logprobs(logits: Rows, token: int, count: int) -> Logprobs:
    """Return natural log probabilities of ``token`` and the ``count`` likeliest, of a raw row."""
    lead = logits.astype(np.float64) - float(logits.max())
    values = lead - np.log(np.exp(lead).sum())
    top = top_ids(logits, count).tolist() if count else []
    return Logprobs(float(values[token]), tuple((i, float(values[i])) for i in top))
