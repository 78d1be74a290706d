"""The real mlx_lm BatchGenerator, driven step by step and counted from outside."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences

from labkit.engine import compute_dtype
from labkit.engine.engine_protocol import (
    NO_TOKEN,
    Counters,
    EngineError,
    InvalidLogitsError,
    KVBytes,
    TokenEvent,
)
from labkit.engine.mlx_lm.batch_generator_counters import BatchGeneratorCounters
from labkit.engine.mlx_lm.mlx_lm_loader import MlxLmModel
from labkit.engine.mlx_lm.mlx_lm_sampling import (
    check_supported,
    make_request_sampler,
    stop_token_ids,
)
from labkit.engine.request import Request
from labkit.machine import openblas_for_mlx

DEFAULT_PREFILL_BATCH_SIZE = 8  # its own default
DEFAULT_PREFILL_STEP_SIZE = 2048  # its own default, in tokens of one prompt
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
    "tokens.sampled",
    "kv.padded_slots",
    "requests.submitted",
    "requests.finished",
    "requests.aborted",
    "requests.refused",
)


class MlxLmEngine:
    """One step: admit, ``BatchGenerator.next``, events.

    The generator's own queue lets more requests decode than its ``completion_batch_size``
    (it does not count those in prefill), so requests wait here and are inserted only while
    fewer than ``max_num_seqs`` are in it. ``prefill_step_size``: prompt tokens of one request
    per step; None: mlx_lm's default of 2,048.
    """

    name = "mlx_lm"
    notes: Mapping[str, str]

    def __init__(
        self, loaded: MlxLmModel, max_num_seqs: int, prefill_step_size: int | None
    ) -> None:
        self.notes = {"dtype": loaded.dtype}
        self._loaded = loaded
        self._max_num_seqs = max_num_seqs
        self._generator: Any = BatchGenerator(
            loaded.model,
            completion_batch_size=max_num_seqs,
            prefill_batch_size=min(max_num_seqs, DEFAULT_PREFILL_BATCH_SIZE),
            prefill_step_size=prefill_step_size or DEFAULT_PREFILL_STEP_SIZE,
        )
        self._waiting: deque[Request] = deque()
        self._live: dict[int, Request] = {}  # by the generator's uid
        self._refused: list[TokenEvent] = []
        self._stops: dict[frozenset[int], Any] = {}
        self._counters = Counters()
        self._work = BatchGeneratorCounters(self._counters, loaded.kv_bytes_by_window)
        self._peak_kv_bytes = 0

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served ends with an error event.

        Raises
        ------
        EngineError
            The request id is live already, or the engine is closed.
        """
        self._open_generator()
        request_id = request.request_id
        if self._is_live(request_id):
            raise EngineError(f"request {request_id}: this id is live already")
        try:
            self._check(request)
        except EngineError as error:
            self._counters.add("requests.refused")
            said = f"request {request_id}: {error}"
            self._refused.append(TokenEvent(request_id, NO_TOKEN, "error", error=said))
            return
        self._counters.add("requests.submitted")
        self._waiting.append(request)

    def _check(self, request: Request) -> None:
        prompt, top = request.prompt_token_ids, self._loaded.vocab_size
        if not prompt:
            raise EngineError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= top:
            raise EngineError(f"token ids must be 0 to {top - 1}")
        check_supported(request.params)

    def _is_live(self, request_id: str) -> bool:
        owners = (*self._waiting, *self._live.values())
        return any(request.request_id == request_id for request in owners)

    def abort(self, request_id: str) -> None:
        """End a request now and free what it holds; unknown or finished ids are ignored."""
        self._refused = [event for event in self._refused if event.request_id != request_id]
        if not self._is_live(request_id):
            return
        self._counters.add("requests.aborted")
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        for uid, request in list(self._live.items()):
            if request.request_id == request_id:
                with mx.stream(self._generator.stream):
                    self._generator.remove([uid])
                del self._live[uid]
                self._work.end(uid)

    def has_work(self) -> bool:
        """Tell whether a request is live or a refusal is not yet reported."""
        return bool(self._refused or self._waiting or self._live)

    def step(self) -> list[TokenEvent]:
        """Run one call of the generator; return the refusals so far, then its tokens.

        The call computes one token of every request that decodes, then up to
        ``prefill_step_size`` tokens of each prompt in its batch of prompts.
        """
        start = time.perf_counter()
        events, self._refused = self._refused, []
        generator = self._open_generator()
        self._admit(generator)
        if not self._live:
            return events
        called = time.perf_counter()
        prompts, tokens = generator.next()
        returned = time.perf_counter()
        self._peak_kv_bytes = max(self._peak_kv_bytes, generator.prompt_cache_nbytes)
        self._work.count(prompts, tokens)
        events += [self._event(response) for response in tokens]
        self._counters.add_all(
            {
                "engine.mlx_lm": 1,
                "steps.total": 1,
                "device_ms": (returned - called) * 1e3,
                "step_ms": (time.perf_counter() - start) * 1e3,
            }
        )
        return events

    def _admit(self, generator: Any) -> None:
        while self._waiting and len(self._live) < self._max_num_seqs:
            request = self._waiting.popleft()
            (uid,) = generator.insert(
                [list(request.prompt_token_ids)],
                [request.params.max_tokens],
                samplers=[make_request_sampler(request)],
                stop_sequences=[self._stop(request)],
            )
            self._live[uid] = request
            self._work.begin(uid)

    def _stop(self, request: Request) -> Any:
        ids = stop_token_ids(request.params, self._loaded.eos_token_ids)
        if ids not in self._stops:
            self._stops[ids] = StopSequences([[token] for token in sorted(ids)])
        return self._stops[ids]

    def _event(self, response: Any) -> TokenEvent:
        request = self._live[response.uid]
        margin = None
        if request.params.greedy:
            margin = logit_margin(response.logprobs, response.token)
            if np.isnan(margin):
                raise InvalidLogitsError(f"logits are not numbers for request {request.request_id}")
        if response.finish_reason is not None:
            del self._live[response.uid]
            self._work.end(response.uid)
            self._counters.add("requests.finished")
        return TokenEvent(request.request_id, response.token, response.finish_reason, margin)

    def drain(self) -> None:
        """Wait for the step that the generator computes ahead; the next call returns its tokens."""
        mx.synchronize(self._open_generator().stream)

    def counters(self) -> dict[str, float]:
        """Return what was counted: steps, tokens, KV bytes, requests and time.

        ``device_ms`` is the time inside ``BatchGenerator.next``, ``host_ms`` the rest of
        the steps. ``peak_kv_bytes``: the most that the generator's caches hold where a
        step ends, padding and spare room included. ``BatchGeneratorCounters`` counts
        the tokens.
        ``blas.*`` says which BLAS MLX multiplies with, ``dtype.*`` in which type, ``weights.*``
        what the weights are held in.
        """
        values = dict.fromkeys(COUNTER_NAMES, 0.0) | self._counters.as_dict()
        return values | {
            "host_ms": values["step_ms"] - values["device_ms"],
            "peak_kv_bytes": self._peak_kv_bytes,
            f"blas.{openblas_for_mlx.active_blas()}": 1,
            f"dtype.{self._loaded.dtype}": 1,
            **compute_dtype.weight_counters(self._loaded.weights),
        }

    def is_running(self, request_id: str) -> bool:
        """Tell whether a request is in the generator."""
        return any(request.request_id == request_id for request in self._live.values())

    def kv_bytes(self) -> KVBytes:
        """Say what the generator's caches hold now, and how much of it is computed tokens."""
        return KVBytes(self._open_generator().prompt_cache_nbytes, self._work.used_bytes())

    def reset_counters(self) -> None:
        """Start counting anew; the peak restarts from what is held now."""
        self._counters.reset()
        self._peak_kv_bytes = self._open_generator().prompt_cache_nbytes

    def clear_cache(self) -> None:
        """Do nothing: the generator keeps nothing of finished requests."""

    def close(self) -> None:
        """End every request and drop the model and the KV memory."""
        if self._generator is None:
            return
        if self._live:
            self._generator.remove(list(self._live))
        self._generator.close()
        self._generator = None
        self._loaded = replace(self._loaded, model=None)
        self._waiting.clear()
        self._live.clear()
        self._refused = []

    def _open_generator(self) -> Any:
        if self._generator is None:
            raise EngineError("the engine is closed")
        return self._generator


def logit_margin(logprobs: mx.array, token: int) -> float:
    """Return a token's lead over the best other one; ``logprobs`` [vocabulary], evaluated."""
    row = np.asarray(logprobs.astype(mx.float32))
    below = np.maximum.reduce(row[:token], initial=NEGATIVE_INFINITY)
    above = np.maximum.reduce(row[token + 1 :], initial=NEGATIVE_INFINITY)
    return float(row[token] - np.maximum(below, above))
