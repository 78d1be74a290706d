"""Answers that are sent as they are computed, and what ends with the client's connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from labkit.server.api_error import ApiError
from labkit.server.api_generation import Generation

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
TIMEOUT = "the request took longer than {:g} s (server.timeout_s)"


class Answer(Response):
    """What comes of a generation: one body, or a stream of server-sent events.

    The client's going away, and the time limit, end the generation. The status is sent with
    the first piece, so that a request that the engine refuses is not answered with 200.

    Parameters
    ----------
    generation
        Aborted wherever this ends.
    timeout_s
        The whole answer may take so long (seconds).
    whole
        Makes the body (JSON), where it is not streamed.
    events
        Yields parts of the stream, each of one event or several.
    broken
        Encodes the error that ends a stream which has begun.
    """

    def __init__(
        self,
        generation: Generation,
        timeout_s: float,
        *,
        whole: Callable[[], Awaitable[bytes]] | None = None,
        events: AsyncIterator[bytes] | None = None,
        broken: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._timeout_s = timeout_s
        self._whole = whole
        self._events = events
        self._broken = broken or broken_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        answering = asyncio.create_task(self._answer(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait(
                {answering, leaving},
                timeout=self._timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not answering.done() and not leaving.done():
                self._generation.fail(ApiError(504, TIMEOUT.format(self._timeout_s)))
                # A client that does not read is not waited for.
                await asyncio.wait({answering, leaving}, timeout=1.0)
            if answering.done():
                answering.result()
        finally:
            self._generation.close()
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _answer(self, send: Send) -> None:
        if self._whole is not None:
            body = await self._whole()
            length = (b"content-length", str(len(body)).encode())
            await _start(send, [(b"content-type", b"application/json"), length])
            await _send(send, body, more=False)
        elif self._events is not None:
            await self._stream(self._events, send)

    async def _stream(self, events: AsyncIterator[bytes], send: Send) -> None:
        started = False
        try:
            async for part in events:
                if not started:
                    await _start(send, HEADERS)
                    started = True
                await _send(send, part, more=True)
        except ApiError as error:
            if not started:
                raise
            await _send(send, self._broken(error), more=True)
        await _send(send, b"", more=False)


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


DONE = b"data: [DONE]\n\n"


def event(encoded: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encoded + b"\n\n"


def named_event(name: str, encoded: bytes) -> bytes:
    """Return a server-sent event that says what it is."""
    return b"event: " + name.encode() + b"\n" + event(encoded)


def broken_stream(error: ApiError) -> bytes:
    """Return how the OpenAI API's streams end with an error."""
    return event(error.encode()) + DONE
