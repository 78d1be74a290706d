"""From logits to tokens, each request by its own parameters and its own random stream.

In this order, as vLLM and mlx_lm have it: bias, penalties (repetition, frequency,
presence); then greedy takes the best, or temperature, top-k, top-p and min-p leave
candidates, of which one uniform number picks one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import InvalidLogitsError, Logprobs
from labkit.engine.logits import DeviceLogits, Logits, Rows
from labkit.engine.request import RequestState
from labkit.engine.sampling import adjust, candidates, draw, logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
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
        if isinstance(logits, DeviceLogits):
            tokens, margins = logits.greedy()
        else:
            tokens, margins = greedy(logits[: len(states)])
        margins = margins[: len(states)]
        if np.isnan(margins).any():
            broken = [states[int(row)].request_id for row in np.flatnonzero(np.isnan(margins))]
            raise InvalidLogitsError(f"logits are not numbers for request {', '.join(broken)}")
        return [
            Sampled(int(tokens[row]), float(margins[row]))
            if state.request.params.plain
            else choose(logits[row], state)
            for row, state in enumerate(states)
        ]


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
