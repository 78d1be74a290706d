"""``MlxLmEngine``: mlx_lm's own BatchGenerator, called step by step and measured from outside."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_top_k, apply_top_p, make_sampler

from labkit.engine.engine_protocol import (
    NO_TOKEN,
    Counters,
    EngineError,
    InvalidLogitsError,
    KVBytes,
    PromptLogprobs,
    TokenEvent,
    check_request,
)
from labkit.engine.mlx_lm.batch_generator_counters import BatchGeneratorCounters
from labkit.engine.model import dtype_resolution
from labkit.engine.model.unpatched_loader import MlxLmModel
from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.prompt_logprobs import concatenate, score_rows
from labkit.engine.sampling.sampler import request_seed
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.machine import openblas_for_mlx

DEFAULT_PREFILL_BATCH_SIZE = 8  # mlx_lm's default
DEFAULT_PREFILL_STEP_SIZE = 2048  # mlx_lm's default, prompt tokens per request and step
MAX_SCORED_ROWS = 256  # of logits at once, as in labkit's engines
NEGATIVE_INFINITY = np.float32(-np.inf)
COUNTER_NAMES = (
    "engine.mlx_lm",
    "steps.total",
    "step_ms",
    "device_ms",
    "tokens.prefill",
    "tokens.decode",
    "tokens.padded",
    "tokens.discarded",
    "tokens.computed",
    "tokens.output",
    "kv.padded_slots",
    "requests.submitted",
    "requests.finished",
    "requests.aborted",
    "requests.refused",
)
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


class MlxLmEngine:
    """An inference engine over a ``BatchGenerator``.

    A step admits waiting requests and calls the generator's ``next`` once. Requests wait in the
    engine's own queue and are inserted only while fewer than ``max_num_seqs`` are in the generator.
    The generator's queue would let more requests decode than its ``completion_batch_size``, because
    it does not count requests in prefill.

    Requests with ``prompt_logprobs`` bypass the generator, which returns no log probabilities of
    prompts: the engine calls the model itself, as mlx_lm's own evaluation does. A step scores the
    first waiting prompt, and the prompts directly behind it that have the same length.

    ``model``: the loaded model. ``max_num_seqs``: the maximum number of requests in the generator
    at the same time. ``prefill_step_size``: prompt tokens of one request per step; None: mlx_lm's
    default of 2,048.
    """

    name = "mlx_lm"
    notes: Mapping[str, str]

    def __init__(self, model: MlxLmModel, max_num_seqs: int, prefill_step_size: int | None) -> None:
        self.notes = {"dtype": model.dtype}
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._generator: Any = BatchGenerator(
            model.model,
            completion_batch_size=max_num_seqs,
            prefill_batch_size=min(max_num_seqs, DEFAULT_PREFILL_BATCH_SIZE),
            prefill_step_size=prefill_step_size or DEFAULT_PREFILL_STEP_SIZE,
        )
        self._waiting: deque[Request] = deque()
        self._scoring: deque[Request] = deque()
        self._live: dict[int, Request] = {}  # by the generator's uid
        self._refused: list[TokenEvent] = []
        self._stop_sequences: dict[frozenset[int], Any] = {}  # by stop token ids
        self._counters = Counters()
        self._token_counters = BatchGeneratorCounters(self._counters, model.kv_bytes_by_window)
        self._peak_kv_bytes = 0

    def submit(self, request: Request) -> None:
        self._open_generator()
        request_id = request.request_id
        if self._is_live(request_id):
            raise EngineError(f"request {request_id}: this id is already in use")
        try:
            self._check(request)
        except EngineError as error:
            self._counters.add("requests.refused")
            message = f"request {request_id}: {error}"
            self._refused.append(TokenEvent(request_id, NO_TOKEN, "error", error=message))
            return
        self._counters.add("requests.submitted")
        scored = request.params.prompt_logprobs is not None
        (self._scoring if scored else self._waiting).append(request)

    def _check(self, request: Request) -> None:
        check_request(request, self._model.vocab_size, self._model.max_context)
        params = request.params
        for name, value in params.changed_outside(SUPPORTED_PARAMS):
            raise EngineError(
                f"{name}={value}: not supported by engine=mlx_lm; leave it at its default"
            )
        if params.prompt_logprobs is not None and params.max_tokens != 1:
            raise EngineError(
                f"prompt_logprobs={params.prompt_logprobs}: engine=mlx_lm needs max_tokens=1"
            )
        if params.prompt_logprobs is not None and len(request.prompt_token_ids) < 2:
            raise EngineError("a prompt of one token has no log probabilities")

    def _is_live(self, request_id: str) -> bool:
        requests = (*self._waiting, *self._scoring, *self._live.values())
        return any(request.request_id == request_id for request in requests)

    def abort(self, request_id: str) -> None:
        self._refused = [event for event in self._refused if event.request_id != request_id]
        if not self._is_live(request_id):
            return
        self._counters.add("requests.aborted")
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self._scoring = deque(r for r in self._scoring if r.request_id != request_id)
        for uid, request in list(self._live.items()):
            if request.request_id == request_id:
                with mx.stream(self._generator.stream):
                    self._generator.remove([uid])
                del self._live[uid]
                self._token_counters.remove_request(uid)

    def has_work(self) -> bool:
        return bool(self._refused or self._waiting or self._scoring or self._live)

    def step(self) -> list[TokenEvent]:
        """Call the generator once; return pending refusals, then the tokens that the call sampled.

        The call decodes one token of every decoding request, then computes up to
        ``prefill_step_size`` tokens of each prompt in the generator's prefill batch.
        """
        start = time.perf_counter()
        events, self._refused = self._refused, []
        generator = self._open_generator()
        if self._scoring:
            events += self._score()
        self._admit(generator)
        if not self._live:
            return events
        before_next = time.perf_counter()
        prompt_responses, token_responses = generator.next()
        after_next = time.perf_counter()
        self._peak_kv_bytes = max(self._peak_kv_bytes, generator.prompt_cache_nbytes)
        self._token_counters.count_call(prompt_responses, token_responses)
        events += [self._event(response) for response in token_responses]
        self._counters.add_all(
            {
                "engine.mlx_lm": 1,
                "steps.total": 1,
                "device_ms": (after_next - before_next) * 1e3,
                "step_ms": (time.perf_counter() - start) * 1e3,
            }
        )
        return events

    def _score(self) -> list[TokenEvent]:
        """Score the first waiting prompt and those behind it of equal length; return the events."""
        start, length = time.perf_counter(), len(self._scoring[0].prompt_token_ids)
        requests: list[Request] = []
        while self._scoring and len(requests) < self._max_num_seqs:
            if len(self._scoring[0].prompt_token_ids) != length:
                break
            requests.append(self._scoring.popleft())
        scored = score_prompts(self._model.model, requests)
        spent_ms = (time.perf_counter() - start) * 1e3
        self._counters.add_all(
            {
                "engine.mlx_lm": 1,
                "steps.total": 1,
                "device_ms": spent_ms,
                "step_ms": spent_ms,
                "tokens.prefill": length * len(requests),
                "tokens.computed": length * len(requests),
                "tokens.output": len(requests),
                "requests.finished": len(requests),
            }
        )
        return [
            TokenEvent(request.request_id, token, "length", prompt_logprobs=logprobs)
            for request, (logprobs, token) in zip(requests, scored, strict=True)
        ]

    def _admit(self, generator: Any) -> None:
        while self._waiting and len(self._live) < self._max_num_seqs:
            request = self._waiting.popleft()
            (uid,) = generator.insert(
                [list(request.prompt_token_ids)],
                [request.params.max_tokens],
                samplers=[make_request_sampler(request)],
                stop_sequences=[self._request_stop_sequences(request)],
            )
            self._live[uid] = request
            self._token_counters.add_request(uid)

    def _request_stop_sequences(self, request: Request) -> Any:
        ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ids |= self._model.eos_token_ids
        if ids not in self._stop_sequences:
            self._stop_sequences[ids] = StopSequences([[token] for token in sorted(ids)])
        return self._stop_sequences[ids]

    def _event(self, response: Any) -> TokenEvent:
        request = self._live[response.uid]
        margin = None
        if request.params.greedy:
            margin = _logit_margin(response.logprobs, response.token)
            if np.isnan(margin):
                raise InvalidLogitsError(f"request {request.request_id}: logits contain NaN")
        if response.finish_reason is not None:
            del self._live[response.uid]
            self._token_counters.remove_request(response.uid)
            self._counters.add("requests.finished")
        return TokenEvent(request.request_id, response.token, response.finish_reason, margin)

    def drain(self) -> None:
        """Wait for the decode step computed ahead, whose tokens the next ``step`` returns."""
        mx.synchronize(self._open_generator().stream)

    def counters(self) -> dict[str, float]:
        """Return the counters: steps, tokens, KV bytes, requests and times (ms).

        ``device_ms`` is the time inside ``BatchGenerator.next``, ``host_ms`` the rest of the
        steps. ``peak_kv_bytes`` is the largest size of the generator's caches after a call,
        including padding and unused capacity. ``BatchGeneratorCounters`` describes the token
        counters. ``blas.*`` names the BLAS that MLX uses, ``dtype.*`` the dtype that it computes
        in, ``weights.*`` the formats of the weights.
        """
        values = dict.fromkeys(COUNTER_NAMES, 0.0) | self._counters.as_dict()
        return values | {
            "host_ms": values["step_ms"] - values["device_ms"],
            "peak_kv_bytes": self._peak_kv_bytes,
            f"blas.{openblas_for_mlx.active_blas()}": 1,
            f"dtype.{self._model.dtype}": 1,
            **dtype_resolution.weight_counters(self._model.weights),
        }

    def is_running(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self._live.values())

    def kv_bytes(self) -> KVBytes:
        return KVBytes(
            self._open_generator().prompt_cache_nbytes, self._token_counters.used_kv_bytes()
        )

    def computed_tokens(self) -> float:
        return self._counters.value("tokens.computed")

    def reset_counters(self) -> None:
        self._counters.reset()
        self._peak_kv_bytes = self._open_generator().prompt_cache_nbytes

    def clear_cache(self) -> None:
        """Do nothing: the generator has no prefix cache."""

    def close(self) -> None:
        if self._generator is None:
            return
        if self._live:
            self._generator.remove(list(self._live))
        self._generator.close()
        self._generator = None
        self._model = replace(self._model, model=None)
        self._waiting.clear()
        self._scoring.clear()
        self._live.clear()
        self._refused = []

    def _open_generator(self) -> Any:
        if self._generator is None:
            raise EngineError("the engine is closed")
        return self._generator


def score_prompts(model: Any, requests: Sequence[Request]) -> list[tuple[PromptLogprobs, int]]:
    """Return each prompt's log probabilities and the greedy token that follows it.

    The prompts have the same length and are computed as one batch. Raises ``InvalidLogitsError`` if
    a row of logits has a NaN, or nothing but infinities.
    """
    tokens = np.array([request.prompt_token_ids for request in requests], np.int32)
    length, cache = tokens.shape[1], make_prompt_cache(model)
    columns = max(1, MAX_SCORED_ROWS // len(requests))
    parts: list[list[PromptLogprobs]] = [[] for _ in requests]
    logits = np.zeros((len(requests), 0, 0), np.float32)
    for start in range(0, length, columns):
        outputs = model(mx.array(tokens[:, start : start + columns]), cache=cache)
        logits = np.array(outputs.astype(mx.float32))
        stop = min(start + columns, length - 1)
        for row, request in enumerate(requests if stop > start else ()):
            ids = request.params.prompt_logprob_ids
            parts[row].append(
                score_rows(
                    logits[row, : stop - start],
                    tokens[row, start + 1 : stop + 1],
                    request.params.prompt_logprobs or 0,
                    None if ids is None else ids[start:stop],
                )
            )
    return [
        (concatenate(of_prompt), int(last.argmax()))
        for of_prompt, last in zip(parts, logits[:, -1], strict=True)
    ]


def _logit_margin(logprobs: mx.array, token: int) -> float:
    """Return the log probability [vocab_size] of ``token`` minus the largest of all others."""
    row = np.asarray(logprobs.astype(mx.float32))
    below = np.maximum.reduce(row[:token], initial=NEGATIVE_INFINITY)
    above = np.maximum.reduce(row[token + 1 :], initial=NEGATIVE_INFINITY)
    return float(row[token] - np.maximum(below, above))


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
