"""The state that all endpoints share: the model, the engine's thread and the live requests.

A request is live from its submission until its end, whether it waits or runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from labkit import config
from labkit.config import count_text
from labkit.engine.engine_protocol import NO_TOKEN, InferenceEngine, LengthLimited
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import Constraint, SamplingParams
from labkit.models import ModelDir
from labkit.models.tokenizer import SpecialTokenEscape, Tokenizer
from labkit.server.constraints.grammar_compiler import GrammarCompiler
from labkit.server.constraints.structured_output import Grammars
from labkit.server.constraints.tool_call_parser import ToolCallParser, detect_tool_call_format
from labkit.server.generation.api_generation import Generation
from labkit.server.generation.engine_thread import EngineStep, EngineThread
from labkit.server.generation.prometheus_metrics import Metrics
from labkit.server.generation.template_processes import TemplateProcesses
from labkit.server.types.api_error import ApiError, invalid

T = TypeVar("T")
CACHE_CONFIG_LABELS = {"blocks.total": "num_gpu_blocks", "kv_block_bytes": "block_bytes"}
RETRY_AFTER_S = 1  # sent to clients while the server is full
STOPPING = "the server is stopping"


class CopyableConstraint(Constraint, Protocol):
    """A constraint that can be copied, because an API request may need several engine requests."""

    def copy(self) -> Constraint:
        """Return the constraint in its initial state, for another engine request."""


class Service:
    """A served model, its engine and the live requests.

    ``options`` is the server's part of the config, and ``name`` the model's name in requests.
    ``takes_priorities``: whether the engine's queue may read priorities. The service's thread
    closes the warmed-up ``engine`` when the service stops. Vocabulary size and context length are
    those of ``model``.
    """

    def __init__(
        self,
        options: config.Server,
        name: str,
        tokenizer: Tokenizer,
        engine: InferenceEngine,
        model: ModelDir,
        *,
        takes_priorities: bool = False,
    ) -> None:
        self.options = options
        self.name = name
        self.engine_name = engine.name
        self.tokenizer = tokenizer
        self.takes_priorities = takes_priorities
        escapes = options.special_tokens_in_content is config.SpecialTokens.escape
        self.special_token_escape = SpecialTokenEscape(tokenizer.special_tokens if escapes else ())
        # Cached because responses with logprobs look up the same ids many times.
        self.token_text = functools.lru_cache(maxsize=1 << 16)(tokenizer.piece)
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        compiler = GrammarCompiler(
            str(model.path / "tokenizer.json"), model.vocab_size, model.eos_token_ids
        )
        self.grammars = Grammars(options, compiler)
        self.tool_call_format = detect_tool_call_format(tokenizer)
        server_limit = options.max_prompt_tokens + (
            options.max_output_tokens or options.max_prompt_tokens
        )
        bounds = [server_limit if model.max_context is None else model.max_context]
        bounds += [engine.max_request_tokens()] if isinstance(engine, LengthLimited) else []
        self.max_model_len = min(bounds)
        self.max_prompt_tokens = min(options.max_prompt_tokens, self.max_model_len - 1)
        self.created = int(time.time())
        self._engine = engine
        self._live: dict[str, Generation] = {}
        self._running: set[str] = set()
        counters = engine.counters()
        cache_config = {
            label: f"{counters[counter]:g}"
            for counter, label in CACHE_CONFIG_LABELS.items()
            if counter in counters
        }
        self.metrics = Metrics(name, cache_config)
        self.templates = TemplateProcesses(tokenizer, model.path)
        self._starting: asyncio.Future[None] | None = None
        self._num_preparing = 0
        self._threads = {
            name: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name} texts")
            for name in ("short", "long")
        }
        self._thread: EngineThread | None = None
        self.engine_failure: str | None = None  # one line about the exception that ended the thread
        self._on_engine_failure: Callable[[], None] = lambda: None
        self._stopping = False
        self._grace_is_over = False

    async def start(self, on_engine_failure: Callable[[], None] = lambda: None) -> None:
        """Start the engine's thread.

        If an exception ends the thread, every request fails, and ``on_engine_failure`` is called on
        the event loop. The service cannot be started again.
        """
        loop = asyncio.get_running_loop()
        self._on_engine_failure = on_engine_failure

        def on_loop(call: Callable[..., None], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call, *args)

        self._thread = EngineThread(
            self._engine,
            lambda step: on_loop(self._deliver, step),
            lambda error: on_loop(self._engine_ended, error),
        )
        self._thread.start()
        self._starting = asyncio.ensure_future(self.templates.start())

    def unhealthy_reason(self, *, in_preparation: bool = False) -> str | None:
        """Return the reason that the server cannot serve (one line), or None if it is healthy.

        A server that is stopping still serves a request ``in_preparation`` until the grace period
        ends. The reason never includes an exception's message, which may contain a client's
        content.
        """
        if self.engine_failure is not None:
            return self.engine_failure
        if self._stopping and (not in_preparation or self._grace_is_over):
            return STOPPING
        if self._thread is None or not self._thread.alive:
            return "the engine's thread has ended"
        if self._thread.busy_s > self.options.stuck_s:
            return f"the engine is stuck: a step has been running for {self._thread.busy_s:.0f} s"
        return None

    async def run_in_thread(self, work: Callable[..., T], *args: Any, long: bool = False) -> T:
        """Run slow work (tokenising) in a thread and return its result.

        ``long``: it may take seconds. Other such work waits for it, but nothing else does. Raises
        ``ApiError`` if the service has stopped (503).
        """
        threads = self._threads["long" if long else "short"]
        try:
            result = asyncio.get_running_loop().run_in_executor(threads, work, *args)
        except RuntimeError:  # the threads have ended
            raise ApiError(503, STOPPING) from None
        return await result

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request in preparation. Raises ``ApiError`` if the server is full or stopping."""
        if self._stopping:
            raise ApiError(503, STOPPING)
        self._check_room(self._num_preparing + 1)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def _check_room(self, count: int) -> None:
        if len(self._live) + count > self.options.max_live:
            raise ApiError(
                429,
                f"{count_text(len(self._live), 'completion')} running or waiting, "
                f"{count_text(self._num_preparing, 'request')} in preparation; the limit is "
                f"{self.options.max_live} (server.max_live)",
                code="queue_full",
                retry_after=RETRY_AFTER_S,
            )

    def check_num_completions(self, count: int) -> None:
        """Raise ``ApiError`` if a request needs more completions than ``server.max_live``."""
        if count > self.options.max_live:
            raise invalid(
                f"the request needs {count} completions; at most {self.options.max_live} may run "
                "at once (server.max_live)"
            )

    def generate(
        self,
        call_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        constraint: CopyableConstraint | None = None,
        single_call_parser: Callable[[], ToolCallParser | None] = lambda: None,
        *,
        max_tokens: Sequence[int] | None = None,
        prompt_only: bool = False,
        priority: int = 0,
    ) -> Generation:
        """Submit ``n`` engine requests per prompt, each with its own copy of the constraint.

        ``max_tokens`` has a value for each prompt, since the context may leave them different room
        (None: that of ``params``). ``single_call_parser`` returns a parser that ends a choice after
        its first tool call, or None if calls do not end a choice. With ``prompt_only``, outputs
        have no tokens: ``params`` must have ``max_tokens=1``, because the engine generates one
        token at least. ``priority`` is that of every engine request. Raises ``ApiError`` if the
        server is full or cannot serve, or the request alone exceeds ``server.max_live``.
        """
        reason = self.unhealthy_reason(in_preparation=True)
        if reason is not None:
            raise ApiError(503, reason)
        assert self._thread is not None
        count = len(prompts) * n
        self.check_num_completions(count)
        self._check_room(count)
        limits = [params.max_tokens] * len(prompts) if max_tokens is None else max_tokens
        requests = [
            Request(
                f"{call_id}-{index * n + choice}",
                tuple(prompt),
                _choice_params(params, choice, constraint, limit),
                priority,
            )
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            for choice in range(n)
        ]
        generation = Generation(
            requests,
            self.tokenizer,
            self.finish_request,
            single_call_parser,
            prompt_only=prompt_only,
        )
        self.metrics.observe("request_params_n", n)
        for request in requests:
            self._live[request.request_id] = generation
            # The generation matches stop strings, because the engine has no tokenizer.
            if request.params.stop:
                without_stop = dataclasses.replace(request.params, stop=())
                request = dataclasses.replace(request, params=without_stop)
            self._thread.submit(request)
        return generation

    async def reset_prefix_cache(self) -> None:
        """Evict the prefix cache. Raises ``ApiError`` if requests are live or it fails."""
        reason = self.unhealthy_reason()
        if reason is not None:
            raise ApiError(503, reason)
        assert self._thread is not None
        if self._live:
            raise ApiError(
                409,
                f"{count_text(len(self._live), 'completion')} running or waiting; the prefix "
                "cache can be reset when there are none",
                code="requests_running",
            )
        loop, cleared = asyncio.get_running_loop(), asyncio.Event()
        self._thread.clear_cache(lambda: loop.call_soon_threadsafe(cleared.set))
        try:
            await asyncio.wait_for(cleared.wait(), self.options.stuck_s)
        except TimeoutError:
            raise ApiError(
                503,
                "the engine did not reset the prefix cache within "
                f"{self.options.stuck_s:g} s (server.stuck_s)",
            ) from None

    def finish_request(self, request_id: str, abort: bool, reason: str) -> None:
        """Remove an ended request, record it and, with ``abort``, abort it in the engine."""
        generation = self._live.pop(request_id, None)
        if generation is None:
            return
        if abort and self._thread is not None:
            self._thread.abort(request_id)
        self._running.discard(request_id)
        metrics, times = self.metrics, generation.times[request_id]
        request = generation.requests[request_id]
        max_tokens = 0 if generation.prompt_only else request.params.max_tokens
        metrics.observe("request_params_max_tokens", max_tokens)
        metrics.record_end(request, times, time.monotonic(), reason)

    def _deliver(self, step: EngineStep) -> None:
        """Pass a step's events to the generations they belong to, and wake their readers."""
        woken: dict[int, Generation] = {}
        self._running = step.running & self._live.keys()
        for request_id in self._running.union(event.request_id for event in step.events):
            if request_id in self._live:
                times = self._live[request_id].times[request_id]
                times.admitted = step.started if times.admitted is None else times.admitted
        for event in step.events:
            generation = self._live.get(event.request_id)
            if generation is not None:
                if event.token != NO_TOKEN:
                    times = generation.times[event.request_id]
                    if times.first is None:
                        prompt = generation.requests[event.request_id].prompt_token_ids
                        self.metrics.record_prompt(len(prompt))
                    if not generation.prompt_only:
                        self.metrics.record_token(times, step.ended)
                generation.put(event)
                woken[id(generation)] = generation
        self.metrics.record_step(step)
        for generation in woken.values():
            generation.wake()

    def metrics_page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self.metrics.running.set(len(self._running))
        self.metrics.waiting.set(len(self._live) - len(self._running))
        return self.metrics.render()

    def _engine_ended(self, error: BaseException | None) -> None:
        if error is None:
            self._fail_all(ApiError(503, STOPPING))
            return
        self.engine_failure = f"the engine failed ({type(error).__name__}); see the server's log"
        self._fail_all(ApiError(500, self.engine_failure))
        self._on_engine_failure()

    def _fail_all(self, error: ApiError) -> None:
        for generation in list(self._live.values()):
            generation.fail(error)

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, wait up to ``grace_s`` seconds for the others, stop the engine.

        Requests that are still live or in preparation after ``grace_s`` seconds fail with status
        503. Those whose grammar is being compiled fail at once.
        """
        self._stopping = True
        deadline = time.monotonic() + grace_s
        await self.grammars.close()
        while (self._live or self._num_preparing) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._grace_is_over = True
        await self.templates.close()
        self._fail_all(ApiError(503, STOPPING))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop, 5.0)
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        if self._starting is not None:
            await self._starting

    @property
    def num_live(self) -> int:
        """The number of completions that are running or waiting."""
        return len(self._live)


def _choice_params(
    params: SamplingParams, choice: int, constraint: CopyableConstraint | None, max_tokens: int
) -> SamplingParams:
    """Return ``params`` with the seed ``seed + choice`` and a copy of the constraint."""
    copied = None if constraint is None else constraint.copy()
    seed = params.seed if params.seed is None else (params.seed + choice) % (1 << 64)
    return dataclasses.replace(params, seed=seed, constraint=copied, max_tokens=max_tokens)


def new_id(kind: str) -> str:
    """Return a new unique id that starts with ``kind``, for example ``chatcmpl-3f0a...``."""
    return f"{kind}-{uuid.uuid4().hex}"
