"""``RemoteEngine``: any OpenAI-compatible server behind labkit's engine protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from labkit import config
from labkit.engine.engine_protocol import (
    NO_TOKEN,
    Counters,
    EngineError,
    PromptLogprobs,
    StreamEvent,
    TokenEvent,
)
from labkit.engine.openai import client_overhead
from labkit.engine.openai.client_overhead import percentiles_ms
from labkit.engine.openai.http_client import CompletedResponse, HttpClient
from labkit.engine.openai.request_payload import PayloadBuilder
from labkit.engine.openai.server_process import ServerProcess
from labkit.engine.openai.sse_decoder import StreamError, TokenUsage, parse_usage
from labkit.engine.openai.streamed_response import StreamedResponse, error_event
from labkit.engine.request import Request
from labkit.models.tokenizer import Detokenizer

MAX_RECORDED_DISAGREEMENTS = 8
DYING_S = 0.5  # from a server's last response, which it may have failed to send, to its end
WRONG_SHAPE = "the response has no prompt_logprobs of the prompt that was sent"
COUNTER_NAMES = (
    "engine.openai",
    "requests.submitted",
    "requests.finished",
    "requests.aborted",
    "requests.refused",
    "stream.chunks",
    "stream.bundled",
    "stream.empty",
    "stream.tool_calls",
    "stream.refusals",
    "prompts.respelled",
)


class RemoteEngine:
    """An inference engine that sends its requests to a server over HTTP.

    ``step`` returns the events of the responses that have ended, and never waits. Each event
    carries the time at which its bytes arrived.

    ``server``: a server that is ready; ``close`` stops it. ``client``: sends the requests.
    ``payloads``: builds the request bodies. ``detokenizer``: counts the tokens of responses without
    token ids, and normalizes their text. ``options``: ``engine.server``.
    """

    name = "openai"

    def __init__(
        self,
        server: ServerProcess,
        client: HttpClient,
        payloads: PayloadBuilder,
        detokenizer: Detokenizer,
        options: config.OpenAIServer,
    ) -> None:
        self._server, self._client = server, client
        self._payloads, self._detokenizer, self._options = payloads, detokenizer, options
        self._live: dict[str, StreamedResponse | ScoredResponse] = {}
        self._keys: dict[str, str] = {}  # by request id
        self._finished: list[StreamedResponse] = []
        self._scored: list[ScoredResponse] = []
        self._refused: list[TokenEvent] = []
        self._counters = Counters()
        self._client_overhead: Mapping[str, Any] | None = None
        self._cpu_s, self._loop_cpu_start_s = 0.0, client.cpu_seconds()
        self._num_sent = 0

    def submit(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._live:
            raise EngineError(f"request {request_id}: this id is already in use")
        try:
            payload = self._payloads.payload(request)
        except EngineError as error:
            self._counters.add("requests.refused")
            message = f"request {request_id}: {error}"
            self._refused.append(TokenEvent(request_id, NO_TOKEN, "error", error=message))
            return
        self._counters.add("requests.submitted")
        self._num_sent += 1
        # The key is unique even if a request id is used again, for example after an abort.
        key = f"{self._num_sent} {request_id}"
        scored = request.params.prompt_logprobs is not None
        self._live[request_id] = ScoredResponse(request) if scored else StreamedResponse(request)
        self._keys[request_id] = key
        self._counters.add("prompts.respelled", not payload.same_ids)
        self._client.send(key, self._payloads.path, payload.body)

    def abort(self, request_id: str) -> None:
        self._refused = [event for event in self._refused if event.request_id != request_id]
        if request_id in self._live:
            self._counters.add("requests.aborted")
            self._client.cancel(self._keys[request_id])
            del self._live[request_id], self._keys[request_id]

    def has_work(self) -> bool:
        return bool(self._live or self._refused)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._client.clock = clock

    def wait(self, seconds: float) -> None:
        if not self._refused:
            self._client.wait(seconds)

    def step(self) -> list[TokenEvent]:
        """Return all events of the responses that ended since the last step, refusals first.

        Raises ``EngineError`` if a request failed, and the server, which labkit started, has ended.
        """
        cpu = time.thread_time()
        events, self._refused = self._refused, []
        for completed in self._client.completed_responses():
            request_id = completed.key.partition(" ")[2]
            if self._keys.get(request_id) == completed.key:  # else it was aborted
                events += self._response_events(request_id, completed)
                if events[-1].error is not None:
                    self._server.check_running()
        if any(
            event.finish_reason is None or event.prompt_logprobs is not None for event in events
        ):
            self._counters.add("engine.openai")
        self._cpu_s += time.thread_time() - cpu
        return events

    def _response_events(self, request_id: str, completed: CompletedResponse) -> list[TokenEvent]:
        response = self._live[request_id]
        events: list[TokenEvent] = []
        last: TokenEvent | None = None
        if isinstance(response, ScoredResponse):
            last = response.final_event(completed)
            if last.error is None:
                self._scored.append(response)
        else:
            try:
                for part in completed.parts:
                    events += response.feed(part.data, part.at, self._counters)
            except StreamError as error:
                last = error_event(response.request, completed.at, str(error))
            if last is None and completed.error is not None:
                last = error_event(response.request, completed.at, completed.error)
            if last is None:
                last = response.final_event(completed.at, self._detokenizer, self._counters)
            if last.error is None:
                self._finished.append(response)
        del self._live[request_id], self._keys[request_id]
        self._counters.add("requests.failed" if last.error else "requests.finished")
        return [*events, last]

    def counters(self) -> dict[str, float]:
        """Return the streams' counters, and the served requests' tokens counted in three ways.

        ``tokens.usage``: the server's own counts. ``tokens.tokenizer``: the model's tokenizer
        applied to the text. ``tokens.stream``: the token ids in a stream, or the chunks with
        content if the server sends no ids.
        """
        counts = dict.fromkeys(COUNTER_NAMES, 0.0) | self._counters.as_dict()
        responses: list[StreamedResponse | ScoredResponse] = [*self._finished, *self._scored]
        usages = [response.usage for response in responses if response.usage is not None]
        if usages:
            counts["tokens.usage"] = sum(usage.completion for usage in usages)
            counts["tokens.prompt_usage"] = sum(usage.prompt for usage in usages)
        cached = [usage.cached for usage in usages if usage.cached is not None]
        if cached:
            counts["tokens.cached"] = sum(cached)
        counts["tokens.stream"] = sum(map(_num_streamed_tokens, self._finished))
        counts["tokens.tokenizer"] = sum(
            self._detokenizer.count_tokens(r.text) for r in self._finished
        )
        counts["tokens.prompt"] = sum(len(r.request.prompt_token_ids) for r in responses)
        return counts

    @property
    def notes(self) -> dict[str, Any]:
        """Notes for the record: the server, the way tokens were counted, and the client's overhead.

        Under ``client``, ``most_late_ms`` is the configured limit on the client's delays, and
        ``floor`` is the overhead that ``client_overhead.measure`` returned.
        """
        return {"server": self._server_notes(), "client": self._client_notes()}

    def _server_notes(self) -> dict[str, Any]:
        preset = self._options.server_preset
        means = {response.counted_by for response in self._finished}
        counts = [(r, r.num_tokens(self._detokenizer)) for r in self._finished]
        excess = [response.first_chunk_excess(count) for response, count in counts]
        return {
            "preset": self._options.preset,
            "command": self._server.command,
            "kept": self._server.url if self._options.url is not None else None,
            "model": self._server.recorded_model,
            "run_here": preset.tested,
            "api": self._options.api.value,
            "prompts": "ids" if preset.token_prompts and not self._payloads.chat else "text",
            "identity": "token ids" if means == {"token ids"} else "text",
            "counted_by": " and ".join(sorted(means)),
            "counted_beyond_max": sum(count > r.request.params.max_tokens for r, count in counts),
            # A parser or a final flush may split a single token's text.
            "counted_below_chunks": sum(count + 1 < r.num_chunks for r, count in counts),
            "first_chunk_excess_pct": 100 * fmean(excess) if excess else 0.0,
            "disagree": self._disagreements(),
        }

    def _disagreements(self) -> list[dict[str, Any]]:
        """Return the first requests whose output tokens were counted differently (``counters``)."""
        disagreements = []
        for response in self._finished:
            counts = {
                "usage": response.usage.completion if response.usage else None,
                "tokenizer": self._detokenizer.count_tokens(response.text),
                "stream": _num_streamed_tokens(response),
            }
            if len({count for count in counts.values() if count is not None}) > 1:
                disagreements.append({"id": response.request.request_id, **counts})
        return disagreements[:MAX_RECORDED_DISAGREEMENTS]

    def _client_notes(self) -> dict[str, Any]:
        num_chunks = self._counters.as_dict().get("stream.chunks", 0.0)
        cpu = self._cpu_s + self._client.cpu_seconds() - self._loop_cpu_start_s
        return {
            "lag_ms": percentiles_ms(self._client.loop_lags_s),
            "late_ms": percentiles_ms(self._client.send_delays_s),
            "cpu_s": round(cpu, 6),
            "connect_ms": percentiles_ms(self._client.connect_times_s),
            "chunk_us": round(1e6 * cpu / num_chunks, 2) if num_chunks else None,
            "most_late_ms": self._options.most_late_ms,
            "floor": self._client_overhead,
        }

    def prepare_requests(self, requests: Sequence[Request], streams: int) -> None:
        """Build the request bodies, and measure the client's overhead with a null server.

        ``streams`` is the number of concurrent requests in that measurement.
        """
        self._payloads.prebuild(requests)
        self._client_overhead = client_overhead.measure(streams, self._options.silence_s)

    def check_running(self) -> None:
        """Raise ``EngineError`` if the server has ended and labkit started it.

        After a failed request, it may take the server a moment to end.
        """
        failed = self._counters.as_dict().get("requests.failed")
        self._server.check_running(DYING_S if failed else 0.0)

    def process_memory(self) -> dict[str, float]:
        return self._server.process_memory()

    def reset_counters(self) -> None:
        self._counters.reset()
        self._finished.clear()
        self._scored.clear()
        self._client.reset_timings()
        self._cpu_s, self._loop_cpu_start_s = 0.0, self._client.cpu_seconds()

    def clear_cache(self) -> None:
        """Empty the server's prefix cache, if its preset says that it can be reset.

        Otherwise nothing happens, because servers have no common way to empty the cache. A server
        that labkit started needs no reset: it is new, and its warm-up uses other prompts than the
        run. Raises ``EngineError`` if the server refuses, for example because it has requests of
        other clients.
        """
        if self._options.server_preset.resets_prefix_cache:
            self._server.reset_prefix_cache()

    def close(self) -> None:
        """Close every connection, and stop the server if labkit started it."""
        self._client.close()
        self._server.stop()


def _num_streamed_tokens(response: StreamedResponse) -> int:
    return len(response.ids) if response.has_token_ids else response.num_chunks


@dataclass(slots=True)
class ScoredResponse:
    """The response to a request with ``prompt_logprobs``: one JSON body, not a stream.

    The format is vLLM's ``prompt_logprobs``: a list with one object per prompt token, and null for
    the first token. An object maps token ids to entries with a log probability, for the prompt
    token itself and for the likeliest tokens at its position. ``usage``: the server's token counts,
    if the response has them.
    """

    request: Request
    usage: TokenUsage | None = None

    def final_event(self, completed: CompletedResponse) -> StreamEvent:
        """Return the request's only event: an error event if the response lacks the scores."""
        if completed.error is not None:
            return error_event(self.request, completed.at, completed.error)
        try:
            body = json.loads(b"".join(part.data for part in completed.parts))
            logprobs = self._logprobs(body["choices"][0]["prompt_logprobs"])
            self.usage = parse_usage(body.get("usage"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return error_event(self.request, completed.at, WRONG_SHAPE)
        return StreamEvent(
            self.request.request_id,
            NO_TOKEN,
            "length",
            received=completed.at,
            prompt_logprobs=logprobs,
        )

    def _logprobs(self, positions: list[Mapping[str, Mapping[str, Any]] | None]) -> PromptLogprobs:
        """Return vLLM's objects as arrays, with as many likeliest tokens as were requested."""
        prompt, top = self.request.prompt_token_ids, self.request.params.prompt_logprobs or 0
        count = len(prompt) - 1
        own = np.empty(count)
        ids, values = np.empty((count, top), np.int32), np.empty((count, top))
        for row, (token, position) in enumerate(zip(prompt[1:], positions[1:], strict=True)):
            logprobs = {int(key): float(item["logprob"]) for key, item in (position or {}).items()}
            own[row] = logprobs[token]
            if len(logprobs) < top:
                raise ValueError(f"a position has {len(logprobs)} of {top} log probabilities")
            likeliest = sorted(logprobs, key=lambda key: (-logprobs[key], key))[:top]
            ids[row], values[row] = likeliest, [logprobs[key] for key in likeliest]
        if not np.isfinite(own).all() or not np.isfinite(values).all():
            raise ValueError("a log probability is not a finite number")
        return PromptLogprobs(own, ids, values, np.empty((count, 0)))
