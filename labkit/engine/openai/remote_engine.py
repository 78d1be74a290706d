"""Any OpenAI-compatible server behind labkit's engine protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN, Counters, EngineError, TokenEvent
from labkit.engine.openai import client_overhead
from labkit.engine.openai.client_overhead import percentiles_ms
from labkit.engine.openai.http_client import CompletedResponse, HttpClient
from labkit.engine.openai.request_payload import PayloadBuilder
from labkit.engine.openai.server_process import ServerProcess
from labkit.engine.openai.sse_decoder import StreamError
from labkit.engine.openai.streamed_response import StreamedResponse, error_event
from labkit.engine.request import Request
from labkit.models.detokenizer import Detokenizer

MAX_RECORDED_DISAGREEMENTS = 8
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
    """Requests go out over HTTP; ``step`` hands over answers that have ended and never waits.

    Their events carry the times at which they came.

    Parameters
    ----------
    server
        Has generated a token; this engine stops it.
    client, asking, spelling
        Send, write and read what is said to it.
    options
        ``engine.server``.
    """

    name = "openai"

    def __init__(
        self,
        server: ServerProcess,
        client: HttpClient,
        asking: PayloadBuilder,
        spelling: Detokenizer,
        options: config.Opponent,
    ) -> None:
        self._server, self._client = server, client
        self._asking, self._spelling, self._options = asking, spelling, options
        self._live: dict[str, StreamedResponse] = {}
        self._serial: dict[str, str] = {}  # key of the client -> request id
        self._keys: dict[str, str] = {}
        self._answered: list[StreamedResponse] = []
        self._refused: list[TokenEvent] = []
        self._counters = Counters()
        self._floor: Mapping[str, Any] | None = None
        self._cpu_s, self._loop_cpu_s, self._sent = 0.0, client.cpu_seconds(), 0

    def submit(self, request: Request) -> None:
        """Send a request; one that cannot be asked of a server ends with an error event.

        Raises
        ------
        EngineError
            The request id is live already.
        """
        request_id = request.request_id
        if request_id in self._live:
            raise EngineError(f"request {request_id}: this id is live already")
        try:
            written = self._asking.written(request)
        except EngineError as error:
            self._counters.add("requests.refused")
            said = f"request {request_id}: {error}"
            self._refused.append(TokenEvent(request_id, NO_TOKEN, "error", error=said))
            return
        self._counters.add("requests.submitted")
        self._sent += 1
        key = f"{self._sent} {request_id}"  # an id may come again, after an abort too
        self._live[request_id] = StreamedResponse(request)
        self._serial[key], self._keys[request_id] = request_id, key
        self._counters.add("prompts.respelled", not written.same)
        self._client.send(key, self._asking.path, written.body)

    def abort(self, request_id: str) -> None:
        """Break a request's connection; unknown or finished ids are ignored."""
        self._refused = [event for event in self._refused if event.request_id != request_id]
        if request_id in self._live:
            self._counters.add("requests.aborted")
            self._client.cancel(self._keys[request_id])
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        del self._serial[self._keys.pop(request_id)]

    def has_work(self) -> bool:
        """Tell whether a request is on its way or a refusal is not yet reported."""
        return bool(self._live or self._refused)

    def wait(self, seconds: float) -> None:
        """Wait until an answer has ended, at most so long."""
        if not self._refused:
            self._client.wait(seconds)

    def step(self) -> list[TokenEvent]:
        """Return the events of the answers that have ended since; nothing where none has."""
        cpu = time.thread_time()
        events, self._refused = self._refused, []
        for arrival in self._client.completed_responses():
            request_id = self._serial.get(arrival.key)
            if request_id is not None:  # else it was aborted
                events += self._take(request_id, arrival)
        if any(event.finish_reason is None for event in events):
            self._counters.add("engine.openai")
        self._cpu_s += time.thread_time() - cpu
        return events

    def _take(self, request_id: str, arrival: CompletedResponse) -> list[TokenEvent]:
        answer = self._live[request_id]
        events: list[TokenEvent] = []
        last: TokenEvent | None = None
        try:
            for block in arrival.blocks:
                events += answer.take(block.data, block.at, self._counters)
        except StreamError as error:
            last = error_event(answer.request, arrival.at, str(error))
        if last is None and arrival.error is not None:
            last = error_event(answer.request, arrival.at, arrival.error)
        if last is None:
            last = answer.finish_event(arrival.at, self._spelling, self._counters)
        self._forget(request_id)
        self._answered.append(answer)
        self._counters.add("requests.failed" if last.error else "requests.finished")
        return [*events, last]

    def counters(self) -> dict[str, float]:
        """Return what was counted of the streams, and tokens three times over.

        ``tokens.usage``: by the server, ``tokens.tokenizer``: of the text as the model's tokenizer
        counts it, ``tokens.stream``: ids in the stream, else its events that carried text.
        """
        counts = dict.fromkeys(COUNTER_NAMES, 0.0) | self._counters.as_dict()
        told = [one.usage for one in self._answered if one.usage is not None]
        if told:
            counts["tokens.usage"] = sum(usage.completion for usage in told)
            counts["tokens.prompt_usage"] = sum(usage.prompt for usage in told)
        cached = [usage.cached for usage in told if usage.cached is not None]
        if cached:
            counts["tokens.cached"] = sum(cached)
        counts["tokens.stream"] = sum(map(_num_streamed_tokens, self._answered))
        counts["tokens.tokenizer"] = sum(self._spelling.count(a.text) for a in self._answered)
        counts["tokens.prompt"] = sum(len(a.request.prompt_token_ids) for a in self._answered)
        return counts

    @property
    def notes(self) -> dict[str, Any]:
        """What the record says of the server, of the counts of it, and of the client."""
        return {"server": self._server_notes(), "client": self._client_notes()}

    def _server_notes(self) -> dict[str, Any]:
        known, ids = self._options.known, [answer.has_token_ids for answer in self._answered]
        by_ids = bool(ids) and all(ids)
        usage = all(answer.usage is not None for answer in self._answered)
        return {
            "preset": self._options.preset,
            "command": self._server.words,
            "kept": self._server.url if self._options.url is not None else None,
            "run_here": known.run_here,
            "api": self._options.api.value,
            "prompts": "ids" if known.token_prompts and not self._asking.chat else "text",
            "identity": "token ids" if by_ids else "text",
            "counted_by": "token ids" if by_ids else "usage" if usage else "tokenizer",
            "disagree": self._disagreements(),
        }

    def _disagreements(self) -> list[dict[str, Any]]:
        """Return the first requests of which the server, the tokenizer and the stream differ."""
        found = []
        for answer in self._answered:
            counts = {
                "usage": answer.usage.completion if answer.usage else None,
                "tokenizer": self._spelling.count(answer.text),
                "stream": _num_streamed_tokens(answer),
            }
            if len({count for count in counts.values() if count is not None}) > 1:
                found.append({"id": answer.request.request_id, **counts})
        return found[:MAX_RECORDED_DISAGREEMENTS]

    def _client_notes(self) -> dict[str, Any]:
        chunks = self._counters.as_dict().get("stream.chunks", 0.0)
        cpu = self._cpu_s + self._client.cpu_seconds() - self._loop_cpu_s
        return {
            "lag_ms": percentiles_ms(self._client.loop_lags_s),
            "late_ms": percentiles_ms(self._client.send_delays_s),
            "cpu_s": round(cpu, 6),
            "connect_ms": percentiles_ms(self._client.connect_times_s),
            "chunk_us": round(1e6 * cpu / chunks, 2) if chunks else None,
            "most_late_ms": self._options.most_late_ms,
            "floor": self._floor,
        }

    def prepare_requests(self, requests: Sequence[Request], streams: int) -> None:
        """Write the requests beforehand, and measure the client by a null server."""
        self._asking.write(requests)
        self._floor = client_overhead.measure(streams, self._options.silence_s)

    def process_memory(self) -> dict[str, float]:
        """Return what the server's processes hold."""
        return self._server.memory()

    def reset_counters(self) -> None:
        """Start counting anew."""
        self._counters.reset()
        self._answered.clear()
        self._client.reset_timings()
        self._cpu_s, self._loop_cpu_s = 0.0, self._client.cpu_seconds()

    def clear_cache(self) -> None:
        """Do nothing: what a server keeps it keeps; it is fresh, and warmed up by other prompts."""

    def close(self) -> None:
        """Break every connection and stop a server that was started here."""
        self._client.close()
        self._server.stop()


def _num_streamed_tokens(answer: StreamedResponse) -> int:
    return len(answer.ids) if answer.has_token_ids else answer.said
