"""Samplers and stop tokens for mlx_lm's BatchGenerator, from labkit's ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_k, apply_top_p, make_sampler

from labkit.engine.engine_protocol import EngineError
from labkit.engine.request import Request, RequestState, SamplingParams
from labkit.engine.sampling.sampler import request_seed

Sampler = Callable[[mx.array], mx.array]

# Shared by all greedy requests: mlx_lm samples a whole batch in one call only if all rows have the
# same sampler object.
GREEDY_SAMPLER: Sampler = make_sampler(temp=0.0)
SUPPORTED_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "prompt_logprob_ids",
)


class SeededSampler:
    """A sampler with mlx_lm's filters and a separate random stream for each request.

    mlx_lm's samplers draw from one global stream, so a request's tokens would depend on the other
    requests in its batch. The filters run in mlx_lm's order (top-p on the probabilities before
    temperature, top-k, temperature), which differs from that of labkit's sampler.
    """

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params = params
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw one token for each row of ``logprobs`` ([1, vocab_size])."""
        params = self._params
        if params.top_p < 1:
            logprobs = apply_top_p(logprobs, params.top_p)
        if 0 < params.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, params.top_k)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(logprobs * (1 / params.temperature), key=key)


def make_request_sampler(request: Request) -> Sampler:
    """Return the shared greedy sampler, or a ``SeededSampler`` if the request is not greedy."""
    if request.params.greedy:
        return GREEDY_SAMPLER
    return SeededSampler(request.params, request_seed(RequestState(request)))


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the token ids that end a request: its own and, unless ignored, the model's EOS."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | eos_token_ids


def check_supported(params: SamplingParams) -> None:
    """Raise ``EngineError`` if a parameter outside ``SUPPORTED_PARAMS`` is not at its default."""
    for name, value in params.changed_outside(SUPPORTED_PARAMS):
        raise EngineError(
            f"{name}={value}: not supported by engine=mlx_lm; leave it at its default"
        )
