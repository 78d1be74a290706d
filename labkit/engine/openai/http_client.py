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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import uvloop

from labkit.engine.openai.http_exchange import HttpExchange, ReceivedBytes
from labkit.machine.exception_text import one_line

T = TypeVar("T")
CHECK_PERIOD_S = 0.05  # between two checks of the loop's delay and of silent streams
CLOSE_TIMEOUT_S = 5.0
SILENCE_ERROR = "the server sent nothing for {:g} s (engine.server.silence_s)"
KEPT_OPEN_ERROR = "the server sent only keep-alives for {:g} s (engine.server.silence_s)"


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

    def _run(self, coroutine: Awaitable[T]) -> T:

        async def wrapper() -> T:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(wrapper(), self._loop).result()

    async def _watch_streams(self) -> None:
        """Run until cancelled: measure the loop's wake-up delay, and fail silent responses.

        A response is silent if nothing but keep-alives has arrived for ``silence_s`` seconds.
        """
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
        """Send a JSON body to ``path`` and return without waiting for the response.

        ``completed_responses`` will return the response, or the error, under ``key``.
        """
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
        """Close a request's connection and drop its response.

        A response that has ended already is still returned by ``completed_responses``.
        """

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
