"""One thread with an event loop, which sends requests and stamps what comes back as it comes.

The loop only stamps. An answer is handed over when it has ended, and read then, outside the loop:
neither do the streams whose chunks come together wait for each other, nor does the client take the
CPU from a server that runs on the same cores for every token of it. How late the loop was, and what
CPU it took, it measures itself. Nothing is sent twice: a connection that breaks has failed its
request. None is used twice either, for a server may close one that is idle just when the next
request goes out on it.
"""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import uvloop

from labkit.engine.openai.http_exchange import HttpExchange, ReceivedBytes, why

T = TypeVar("T")
CHECK_PERIOD_S = 0.05  # between two looks at the loop's own lag, and for streams that fell silent
CLOSE_TIMEOUT_S = 5.0
SILENCE_ERROR = "it said nothing for {:g} s (engine.server.silence_s)"


@dataclass(frozen=True, slots=True)
class CompletedResponse:
    """An answer that has ended, at ``at`` on ``time.perf_counter``.

    ``blocks`` are what was read of its stream, in order; ``error``: why it failed, if it did.
    """

    key: str
    at: float
    blocks: Sequence[ReceivedBytes]
    error: str | None = None


class HttpClient:
    """Sends requests to one server, each once, and hands over their answers.

    Parameters
    ----------
    url
        The server's address, without ``/v1``.
    silence_s
        An answer of which nothing comes for so long has failed.
    """

    def __init__(self, url: str, silence_s: float) -> None:
        self.loop_lags_s: list[float] = []  # seconds by which the loop woke late
        self.send_delays_s: list[float] = []  # seconds from ``send`` until the loop began with it
        self.connect_times_s: list[float] = []  # seconds until the server took a connection
        self._loop = uvloop.new_event_loop()
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        self._connect_to = partial(
            self._loop.create_connection, host=parts.hostname, port=port, ssl=tls
        )
        self._prefix, self._host = parts.path, parts.netloc.rpartition("@")[2]
        self._silence_s = silence_s
        self._arrived: queue.SimpleQueue[CompletedResponse] = queue.SimpleQueue()
        self._pending: list[CompletedResponse] = []
        self._exchanges: dict[str, HttpExchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _run(self, coroutine: Awaitable[T]) -> T:
        async def whole() -> T:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(whole(), self._loop).result()

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + CHECK_PERIOD_S
            await asyncio.sleep(CHECK_PERIOD_S)
            now = time.perf_counter()
            self.loop_lags_s.append(max(0.0, now - due))
            for exchange in [*self._exchanges.values()]:
                if now - exchange.last_activity > self._silence_s:
                    exchange.end(SILENCE_ERROR.format(self._silence_s))

    def send(self, key: str, path: str, body: bytes) -> None:
        """Send a request, whose body is JSON; what comes of it arrives under ``key``."""
        asked = time.perf_counter()
        self._loop.call_soon_threadsafe(self._begin, key, path, body, asked)

    def _begin(self, key: str, path: str, body: bytes, asked: float) -> None:
        self.send_delays_s.append(time.perf_counter() - asked)
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        request, on_end = head.encode() + body, partial(self._end, key)
        self._exchanges[key] = exchange = HttpExchange(request, self.connect_times_s.append, on_end)
        task = self._loop.create_task(self._connect(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, exchange: HttpExchange) -> None:
        try:
            await self._connect_to(lambda: exchange)
        except OSError as error:
            exchange.end(why(error))

    def _end(self, key: str, exchange: HttpExchange, error: str | None) -> None:
        del self._exchanges[key]
        self._arrived.put(CompletedResponse(key, time.perf_counter(), exchange.blocks, error))

    def wait(self, seconds: float) -> None:
        """Wait until an answer has ended, at most so long."""
        if self._pending or not self._arrived.empty():
            return
        try:
            self._pending.append(self._arrived.get(timeout=seconds))
        except queue.Empty:
            return

    def completed_responses(self) -> Sequence[CompletedResponse]:
        """Return the answers that have ended since the last call, in order."""
        found, self._pending = self._pending, []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def cancel(self, key: str) -> None:
        """Break a request's connection; what has come of it is dropped, unless it has arrived."""

        async def end() -> None:
            exchange = self._exchanges.pop(key, None)
            if exchange is not None:
                exchange.abort()

        self._run(end())

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the loop's thread has taken."""

        async def look() -> float:
            return time.thread_time()

        return self._run(look())

    def reset_timings(self) -> None:
        """Start measuring lag, lateness and connections anew."""
        for times in (self.loop_lags_s, self.send_delays_s, self.connect_times_s):
            times.clear()

    def close(self) -> None:
        """Break every connection and end the thread; harmless to call again."""
        if self._loop.is_closed():
            return
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _shut(self) -> None:
        for exchange in self._exchanges.values():
            exchange.abort()
        self._exchanges.clear()
        self._watching.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
