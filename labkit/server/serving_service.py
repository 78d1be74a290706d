"""What all endpoints share: a model, its engine's thread, and the requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN, InferenceEngine, LengthLimited
from labkit.engine.request import Request, SamplingParams
from labkit.machine.exception_text import one_line_with_type
from labkit.models import ModelDir
from labkit.models.tokenizer import Tokenizer
from labkit.server.api_error import ApiError, invalid
from labkit.server.api_generation import Generation
from labkit.server.engine_thread import EngineStep, EngineThread
from labkit.server.prometheus_metrics import Metrics
from labkit.server.structured_output import GrammarConstraint, Grammars
from labkit.server.tool_calls import call_format

T = TypeVar("T")
CACHE_FACTS = {"blocks.total": "num_gpu_blocks", "kv_block_bytes": "block_bytes"}
RETRY_AFTER_S = 1  # what a client is told to wait where the server is full (seconds)


class Service:
    """A model that is served.

    Parameters
    ----------
    options
        The server's part of the config.
    name
        What requests call the model.
    tokenizer
        The model's.
    engine
        Ready to serve; the service closes it.
    model
        Its vocabulary, and for how many tokens, prompt and output together, it was made.
    """

    def __init__(
        self,
        options: config.Server,
        name: str,
        tokenizer: Tokenizer,
        engine: InferenceEngine,
        model: ModelDir,
    ) -> None:
        self.options = options
        self.name = name
        self.tokenizer = tokenizer
        # An id's text is asked for again and again where log probabilities are told.
        self.spell = functools.lru_cache(maxsize=1 << 16)(tokenizer.piece)
        self.vocab_size = model.vocab_size
        self.grammars = Grammars(
            model.path / "tokenizer.json", model.vocab_size, model.eos_token_ids
        )
        self.call_format = call_format(tokenizer)
        asked = options.max_prompt_tokens + options.max_output_tokens
        bounds = [asked if model.max_context is None else model.max_context]
        bounds += [engine.max_request_tokens()] if isinstance(engine, LengthLimited) else []
        self.context = min(bounds)
        self.created = int(time.time())
        self._engine = engine
        self._live: dict[str, Generation] = {}
        self._running: set[str] = set()
        found = engine.counters()
        blocks = {k: f"{found[k]:g}" for k in ("blocks.total", "kv_block_bytes") if k in found}
        facts = {CACHE_FACTS[name]: value for name, value in blocks.items()}
        self.metrics = Metrics(name, facts)
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
        self._thread: EngineThread | None = None
        self._ended_by: str | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the engine's thread."""
        loop = asyncio.get_running_loop()

        def tell(call: Callable[..., None], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(call, *args)

        self._thread = EngineThread(
            self._engine,
            lambda step: tell(self._deliver, step),
            lambda error: tell(self._engine_ended, error),
        )
        self._thread.start()

    def trouble(self) -> str | None:
        """Say why nothing can be served, in one line; None: it can."""
        if self._thread is None or not self._thread.alive or self._ended_by is not None:
            return f"the engine's thread is dead ({self._ended_by or 'it ended'})"
        if self._thread.busy_s > self.options.stuck_s:
            return f"the engine is stuck: a step has been running for {self._thread.busy_s:.0f} s"
        return "the server is stopping" if self._stopping else None

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work``, which may take long, in a thread: tokenising, templates, grammars."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *args)

    def generate(
        self,
        call_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        constraint: GrammarConstraint | None = None,
    ) -> Generation:
        """Begin ``n`` choices of each prompt, each with a copy of the constraint.

        Raises
        ------
        ApiError
            The server is full, or cannot serve.
        """
        trouble = self.trouble()
        if trouble is not None or self._thread is None:
            raise ApiError(503, trouble or "the server has not started")
        count = len(prompts) * n
        if count > self.options.max_live:
            raise invalid(
                f"{count} completions are asked for; allowed are {self.options.max_live} at once"
            )
        if len(self._live) + count > self.options.max_live:
            raise ApiError(
                429,
                f"{len(self._live)} completions are running or waiting; allowed are "
                f"{self.options.max_live} (server.max_live)",
                code="queue_full",
                retry_after=RETRY_AFTER_S,
            )
        requests = [
            Request(f"{call_id}-{at * n + choice}", tuple(prompt), nth(params, choice, constraint))
            for at, prompt in enumerate(prompts)
            for choice in range(n)
        ]
        generation = Generation(requests, self.tokenizer, self.forget)
        self.metrics.observe("request_params_n", n)
        for request in requests:
            self._live[request.request_id] = generation
            # Stop texts are looked for here: the engine has no tokenizer.
            bare = dataclasses.replace(request.params, stop=()) if request.params.stop else None
            self._thread.submit(dataclasses.replace(request, params=bare) if bare else request)
        return generation

    def forget(self, request_id: str, abort: bool, reason: str) -> None:
        """Drop an engine request that has ended, or shall."""
        generation = self._live.pop(request_id, None)
        if generation is None:
            return
        if abort and self._thread is not None:
            self._thread.abort(request_id)
        self._running.discard(request_id)
        metrics, times = self.metrics, generation.times[request_id]
        metrics.end(generation.requests[request_id], times, time.monotonic(), reason)

    def _deliver(self, step: EngineStep) -> None:
        """Hand a step's events to the generations that wait for them."""
        woken: dict[int, Generation] = {}
        for request_id in step.admitted:
            if request_id in self._live:
                self._live[request_id].times[request_id].admitted = step.began
                self._running.add(request_id)
        for event in step.events:
            generation = self._live.get(event.request_id)
            if generation is not None:
                if event.token != NO_TOKEN:
                    self.metrics.token(generation.times[event.request_id], step.ended)
                generation.put(event)
                woken[id(generation)] = generation
        self.metrics.step(step)
        for generation in woken.values():
            generation.wake()

    def metrics_page(self) -> bytes:
        """Return the metrics as Prometheus reads them."""
        self.metrics.running.set(len(self._running))
        self.metrics.waiting.set(len(self._live) - len(self._running))
        return self.metrics.page()

    def _engine_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._ended_by = one_line_with_type(error)
        self._fail_all(ApiError(500, f"the engine failed: {self._ended_by or 'it was stopped'}"))

    def _fail_all(self, error: ApiError) -> None:
        for generation in list(self._live.values()):
            generation.fail(error)

    async def stop(self, grace_s: float) -> None:
        """Refuse what comes, let requests go on for a while, then end them, and the engine."""
        self._stopping = True
        end = time.monotonic() + grace_s
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._fail_all(ApiError(503, "the server is stopping"))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop, 5.0)
        self._readers.shutdown(wait=False, cancel_futures=True)

    @property
    def num_live(self) -> int:
        """Completions running or waiting."""
        return len(self._live)


def nth(
    params: SamplingParams, choice: int, constraint: GrammarConstraint | None
) -> SamplingParams:
    """Return the parameters of a request's choice: each draws from a stream of its own."""
    own = None if constraint is None else constraint.copy()
    seed = params.seed if params.seed is None else (params.seed + choice) % (1 << 64)
    return dataclasses.replace(params, seed=seed, constraint=own)


def new_id(kind: str) -> str:
    """Return a new id, such as ``chatcmpl-...``."""
    return f"{kind}-{uuid.uuid4().hex}"
