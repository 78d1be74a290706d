"""An HTTP client: one thread with an event loop that sends requests and timestamps received bytes.

The loop only stores the received bytes with their times. A response is parsed after it has ended,
outside the loop. So streams whose chunks arrive together do not delay each other, and the client
takes no CPU time per token from a server on the same cores. The client also measures the loop's
wake-up delay and CPU time.

No request is sent twice: a broken connection fails its request. Every request has a connection of
its own: a server may close an idle connection just when the next request is sent on it.
"""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httptools
import uvloop

from labkit.engine.openai.sse_decoder import error_text, may_have_content
from labkit.machine.exception_text import one_line

T = TypeVar("T")
CHECK_PERIOD_S = 0.05  # between two checks of the loop's delay and of silent streams
CLOSE_TIMEOUT_S = 5.0
SILENCE_ERROR = "the server sent nothing for {:g} s (engine.server.silence_s)"
KEPT_OPEN_ERROR = "the server sent only keep-alives for {:g} s (engine.server.silence_s)"
TRUNCATED_ERROR = "the connection closed before the response was complete"


class ReceivedBytes(NamedTuple):
    """The body bytes that one read returned, and the time ``at`` of the read (seconds)."""

    at: float
    data: bytes


class HttpExchange(asyncio.Protocol):
    """An asyncio protocol that sends a request when connected and collects the response.

    ``parts`` has the body's bytes, one part per read. ``last_activity`` is the time (on ``clock``)
    at which bytes last arrived, or at which the exchange was created or connected. ``content_at``
    is the time since which content may have been missing (``look_for_content``).

    ``request``: head and body, ready to be sent. ``on_connected``: called once with the seconds
    that connecting took. ``on_end``: called once when the response has ended, with the exchange and
    the error: one line, or None if the response succeeded. Not called after ``abort``. ``clock``:
    returns seconds.
    """

    def __init__(
        self,
        request: bytes,
        on_connected: Callable[[float], None],
        on_end: Callable[[HttpExchange, str | None], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.parts: list[ReceivedBytes] = []
        self._clock = clock
        self.last_activity = self.content_at = clock()
        self._num_examined = 0
        self._request, self._on_connected, self._on_end = request, on_connected, on_end
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._read_now: list[bytes] = []  # body chunks of the current read
        self._location = ""
        self._has_head = self._has_length = self._complete = self._ended = False

    def connection_made(self, transport: Any) -> None:
        if self._ended:  # aborted while it was connecting
            transport.abort()
            return
        self._transport = transport
        now = self._clock()
        self._on_connected(now - self.last_activity)
        self.last_activity = self.content_at = now
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Append the body bytes of one read to ``parts``, several HTTP chunks as one part."""
        self.last_activity = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                self.end(f"no HTTP response: {error}")
                return
        if self._read_now:
            self.parts.append(ReceivedBytes(self.last_activity, b"".join(self._read_now)))
            self._read_now.clear()
        if self._complete:
            self.end(self._status_error())

    def connection_lost(self, error: Exception | None) -> None:
        """End the response when the connection has closed.

        If its head announced no length and there is no ``error``, the response is complete. If the
        head announced a length, the response was truncated.
        """
        if error is not None:
            self.end(one_line(error))
        else:
            is_whole = self._has_head and not self._has_length
            self.end(self._status_error() if is_whole else TRUNCATED_ERROR)

    def look_for_content(self) -> float:
        """Return ``content_at``, after it has been moved to the last read that may have content.

        The reads since the last call are examined, the newest first. An active stream costs one
        look, however much has arrived, so a rare call delays no other stream.
        """
        for part in reversed(self.parts[self._num_examined :]):
            if may_have_content(part.data):
                self.content_at = part.at
                break
        self._num_examined = len(self.parts)
        return self.content_at

    def end(self, error: str | None) -> None:
        """Close the connection and call ``on_end``. Further calls do nothing."""
        if not self._ended:
            self.abort()
            self._on_end(self, error)

    def abort(self) -> None:
        """Close the connection without calling ``on_end``."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def _status_error(self) -> str | None:
        status = self._parser.get_status_code()
        if status == 200:
            return None
        if self._location and 300 <= status < 400:
            return f"{status}: it redirects to {self._location}"
        return f"{status}: {error_text(b''.join(part.data for part in self.parts))}"

    # Callbacks of httptools' parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record whether the head announces where the body ends, and a redirect's target."""
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"location":
            self._location = " ".join(value.decode(errors="replace").split())

    def on_headers_complete(self) -> None:
        """Record that the final head is read. A head with status 1xx precedes another head."""
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._read_now.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._has_head


@dataclass(frozen=True, slots=True)
class CompletedResponse:
    """A response that ended at ``at`` (on the client's clock).

    ``key`` is the key under which the request was sent. ``parts`` has the body's bytes in order,
    one part per read. ``error`` is the reason that the response failed, or None if it succeeded.
    """

    key: str
    at: float
    parts: Sequence[ReceivedBytes]
    error: str | None = None


class HttpClient:
    """A client of one server that sends each request once and returns responses as they end.

    ``clock`` returns the time in seconds. It may stand still while client and server are suspended.

    ``url``: the server's address, without ``/v1``. ``silence_s``: a response fails when nothing of
    its content has arrived for this many seconds. ``api_key``: the key that requests send; None: no
    key.
    """

    def __init__(self, url: str, silence_s: float, api_key: str | None = None) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self.loop_lags_s: list[float] = []  # delays with which the loop woke up
        self.send_delays_s: list[float] = []  # from ``send`` until the loop took the request
        self.connect_times_s: list[float] = []
        self._loop = uvloop.new_event_loop()
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        self._create_connection = partial(
            self._loop.create_connection, host=parts.hostname, port=port, ssl=tls
        )
        self._prefix, self._host = parts.path, parts.netloc.rpartition("@")[2]
        self._silence_s = silence_s
        # Not an f-string: there, a text of the environment is its expression.
        self._authorization = "Authorization: Bearer " + api_key + "\r\n" if api_key else ""
        self._completed: queue.SimpleQueue[CompletedResponse] = queue.SimpleQueue()
        self._taken_by_wait: list[CompletedResponse] = []
        self._exchanges: dict[str, HttpExchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._watch_task = asyncio.run_coroutine_threadsafe(self._watch_streams(), self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _watch_streams(self) -> None:
        """Measure the loop's wake-up delay, and fail responses with only keep-alives for a time."""
        while True:
            due = self.clock() + CHECK_PERIOD_S
            await asyncio.sleep(CHECK_PERIOD_S)
            now = self.clock()
            self.loop_lags_s.append(max(0.0, now - due))
            for exchange in [*self._exchanges.values()]:
                if now - exchange.content_at <= self._silence_s:
                    continue
                if now - exchange.last_activity > self._silence_s:
                    exchange.end(SILENCE_ERROR.format(self._silence_s))
                elif now - exchange.look_for_content() > self._silence_s:
                    exchange.end(KEPT_OPEN_ERROR.format(self._silence_s))

    def send(self, key: str, path: str, body: bytes) -> None:
        """Send a JSON body. ``completed_responses`` will return the response under ``key``."""
        submitted = self.clock()
        self._loop.call_soon_threadsafe(self._begin, key, path, body, submitted)

    def _begin(self, key: str, path: str, body: bytes, submitted: float) -> None:
        self.send_delays_s.append(self.clock() - submitted)
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"{self._authorization}Connection: close\r\n\r\n"
        )
        request, on_end = head.encode() + body, partial(self._end, key)
        self._exchanges[key] = exchange = HttpExchange(
            request, self.connect_times_s.append, on_end, self.clock
        )
        task = self._loop.create_task(self._connect(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, exchange: HttpExchange) -> None:
        try:
            await self._create_connection(lambda: exchange)
        except OSError as error:
            exchange.end(one_line(error))

    def _end(self, key: str, exchange: HttpExchange, error: str | None) -> None:
        del self._exchanges[key]
        self._completed.put(CompletedResponse(key, self.clock(), exchange.parts, error))

    def wait(self, seconds: float) -> None:
        """Wait until a response has ended, for at most ``seconds``."""
        if self._taken_by_wait or not self._completed.empty():
            return
        try:
            self._taken_by_wait.append(self._completed.get(timeout=seconds))
        except queue.Empty:
            return

    def completed_responses(self) -> Sequence[CompletedResponse]:
        """Return the responses that have ended since the last call, in the order they ended."""
        completed, self._taken_by_wait = self._taken_by_wait, []
        while not self._completed.empty():
            completed.append(self._completed.get())
        return completed

    def cancel(self, key: str) -> None:
        """Close a request's connection. A response that has ended already is still returned."""

        async def abort() -> None:
            exchange = self._exchanges.pop(key, None)
            if exchange is not None:
                exchange.abort()

        self._run(abort())

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the loop's thread has used."""

        async def thread_time() -> float:
            return time.thread_time()

        return self._run(thread_time())

    def reset_timings(self) -> None:
        """Forget the measured delays and connection times."""
        for times in (self.loop_lags_s, self.send_delays_s, self.connect_times_s):
            times.clear()

    def close(self) -> None:
        """Close every connection and end the thread. Further calls do nothing."""
        if self._loop.is_closed():
            return
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _shut_down(self) -> None:
        for exchange in self._exchanges.values():
            exchange.abort()
        self._exchanges.clear()
        self._watch_task.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
