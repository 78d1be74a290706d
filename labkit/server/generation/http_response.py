"""HTTP responses of generations, as one body or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from labkit.server.generation.api_generation import Generation
from labkit.server.types.api_error import ApiError, internal_error

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_response(value: Any) -> Response:
    """Return a response with a value that msgspec encodes."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def timeout_error(timeout_s: float) -> ApiError:
    """Return the error of a request that has taken ``timeout_s`` seconds."""
    return ApiError(504, f"the request took longer than {timeout_s:g} s (server.timeout_s)")


class ReplyWriter(Protocol):
    """Writes the body or the events of a response."""

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""

    def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""

    def encode_error(self, error: ApiError, /) -> bytes:
        """Return the events that end a stream after an error."""


class GenerationResponse(Response):
    """The HTTP response of a generation: one body, or a stream of server-sent events.

    The generation is aborted when the client disconnects or the time limit is reached. The status
    is not sent before the first output, so that a request refused by the engine gets an error
    status instead of 200.

    ``generation`` is closed when the response ends. ``timeout_s`` is the time limit of the entire
    response, and ``spent_s`` how much of it had passed when the generation began (seconds).
    """

    def __init__(
        self, generation: Generation, timeout_s: float, writer: ReplyWriter, stream: bool | None
    ) -> None:
        super().__init__()
        self._generation = generation
        self._timeout_s = timeout_s
        self.spent_s = 0.0
        self._started = False
        self._awaits_part = False  # the stream's next part, while nothing is being sent
        self._writer = writer
        self._is_stream = bool(stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until it is complete, the client disconnects or time runs out."""
        sending = asyncio.create_task(self._respond(send))
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait(
                {sending, disconnected},
                timeout=self._timeout_s - self.spent_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not sending.done() and not disconnected.done():
                self._generation.fail(timeout_error(self._timeout_s))
                # A client that does not read must not delay the end of the response.
                await asyncio.wait(
                    {sending, disconnected}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
            if sending.done():
                sending.result()
            elif not (disconnected.done() or self._started):  # the body is being formatted
                raise timeout_error(self._timeout_s)
            elif self._awaits_part and not disconnected.done():  # the stream's next part is
                sending.cancel()
                await asyncio.wait({sending})
                error = self._writer.encode_error(timeout_error(self._timeout_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await _send(send, error, more=False)
        finally:
            self._generation.close()
            for task in (sending, disconnected):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _respond(self, send: Send) -> None:
        if self._is_stream:
            await self._stream(send)
            return
        body = await self._writer.full_body()
        length = (b"content-length", str(len(body)).encode())
        await self._start(send, [(b"content-type", b"application/json"), length])
        await _send(send, body, more=False)

    async def _stream(self, send: Send) -> None:
        last = b""
        self._awaits_part = True
        try:
            async for part in self._writer.events():
                self._awaits_part = False
                if not self._started:
                    await self._start(send, STREAM_HEADERS)
                await _send(send, part, more=True)
                self._awaits_part = True
        except Exception as error:
            if not self._started:
                raise
            api_error = error if isinstance(error, ApiError) else internal_error(error)
            last = self._writer.encode_error(api_error)
        self._awaits_part = False
        await _send(send, last, more=False)

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. Parts of the request's body are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


DONE = b"data: [DONE]\n\n"


def sse_event(encoded: bytes) -> bytes:
    """Return a server-sent event whose data is ``encoded``."""
    return b"data: " + encoded + b"\n\n"


def named_sse_event(name: str, encoded: bytes) -> bytes:
    """Return a server-sent event whose ``event`` field is ``name``."""
    return b"event: " + name.encode() + b"\n" + sse_event(encoded)


def stream_error_event(error: ApiError) -> bytes:
    """Return the events that end a stream of the OpenAI API after an error."""
    return sse_event(error.encode()) + DONE
