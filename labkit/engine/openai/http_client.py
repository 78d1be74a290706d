"""One thread with an event loop, which sends requests and stamps what comes back as it comes.

The loop only stamps and hands over; nothing is parsed in it, so that the streams whose chunks come
together do not wait for each other. How late it was, and what CPU it took, it measures itself.
Nothing is sent twice: a connection that breaks has failed its request. None is used twice either,
for a server may close one that is idle just when the next request goes out on it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp

from labkit.engine.openai.sse import error_text

T = TypeVar("T")
LOOK_S = 0.02  # between two looks at the loop's own lag
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came for a request: ``at`` is on ``time.perf_counter``.

    ``block``: bytes of its stream; ``error``: why it failed. Neither: the stream has ended.
    """

    key: str
    at: float
    block: bytes | None = None
    error: str | None = None


class HttpClient:
    """Sends requests to one server, each once, and hands over what arrives.

    Parameters
    ----------
    url
        The server's address, without ``/v1``.
    silence_s
        A stream that says nothing for so long has failed.
    """

    def __init__(self, url: str, silence_s: float) -> None:
        self.lags: list[float] = []  # seconds by which the loop woke late
        self.lateness: list[float] = []  # seconds from ``send`` until the loop began with it
        self.connecting: list[float] = []  # seconds until the server took a connection
        self._url, self._silence_s = url, silence_s
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._pending: list[Arrival] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._run(self._open())

    def _run(self, coroutine: Awaitable[T]) -> T:
        async def whole() -> T:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(whole(), self._loop).result()

    async def _open(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(self._connects)
        trace.on_connection_create_end.append(self._connected)
        self._watcher = self._loop.create_task(self._watch())
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._silence_s),
            trace_configs=[trace],
            read_bufsize=1 << 20,
        )

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.lags.append(max(0.0, time.perf_counter() - due))

    async def _connects(self, session: Any, context: SimpleNamespace, params: Any) -> None:
        context.began = time.perf_counter()

    async def _connected(self, session: Any, context: SimpleNamespace, params: Any) -> None:
        self.connecting.append(time.perf_counter() - context.began)

    def send(self, key: str, path: str, body: bytes) -> None:
        """Send a request, whose body is JSON; what comes of it arrives under ``key``."""
        asked = time.perf_counter()
        self._loop.call_soon_threadsafe(self._begin, key, path, body, asked)

    def _begin(self, key: str, path: str, data: bytes, asked: float) -> None:
        self._tasks[key] = self._loop.create_task(self._stream(key, path, data, asked))

    async def _stream(self, key: str, path: str, data: bytes, asked: float) -> None:
        put = self._arrived.put
        self.lateness.append(time.perf_counter() - asked)
        try:
            async with self._session.post(
                self._url + path,
                data=data,
                headers={"content-type": "application/json"},
            ) as response:
                if response.status != 200:
                    said = error_text(await response.read())
                    put(Arrival(key, time.perf_counter(), error=f"{response.status}: {said}"))
                    return
                async for block in response.content.iter_any():
                    put(Arrival(key, time.perf_counter(), block))
            put(Arrival(key, time.perf_counter()))
        except asyncio.CancelledError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            put(Arrival(key, time.perf_counter(), error=self._why(error)))
        except Exception as error:  # a defect of ours must not leave a request hanging
            put(Arrival(key, time.perf_counter(), error=f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(key, None)

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it said nothing for {self._silence_s:g} s (engine.server.silence_s)"
        return " ".join(str(error).split()) or type(error).__name__

    def wait(self, seconds: float) -> None:
        """Wait until something has arrived, at most so long."""
        if self._pending or not self._arrived.empty():
            return
        try:
            self._pending.append(self._arrived.get(timeout=seconds))
        except queue.Empty:
            return

    def arrived(self) -> Sequence[Arrival]:
        """Return what has arrived since the last call, in order."""
        found, self._pending = self._pending, []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def cancel(self, key: str) -> None:
        """Break a request's connection; what has come of it already still arrives."""

        async def end() -> None:
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()

        self._run(end())

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the loop's thread has taken."""

        async def look() -> float:
            return time.thread_time()

        return self._run(look())

    def forget_times(self) -> None:
        """Start measuring lag, lateness and connections anew."""
        for times in (self.lags, self.lateness, self.connecting):
            times.clear()

    def close(self) -> None:
        """Break every connection and end the thread; harmless to call again."""
        if self._loop.is_closed():
            return
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()

    async def _shut(self) -> None:
        tasks = [*self._tasks.values(), self._watcher]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()
