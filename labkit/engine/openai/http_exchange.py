"""One request on a connection of its own, and what is read of its answer, stamped as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools

from labkit.engine.openai.sse_decoder import error_text

TRUNCATED_ERROR = "the connection ended before the answer did"


class ReceivedBytes(NamedTuple):
    """What was read of an answer at once: ``at`` is on ``time.perf_counter``."""

    at: float
    data: bytes


class HttpExchange(asyncio.Protocol):
    """Sends a request when it is connected, and keeps what comes until the answer has ended.

    ``blocks`` are what came; ``last_activity`` is when anything last did, or when it began.

    Parameters
    ----------
    request
        Head and body, as they are sent.
    on_connected
        Told once, with the seconds that it took.
    on_end
        Told once, when the answer has ended: with None, or with one line that says why it failed.
    """

    def __init__(
        self,
        request: bytes,
        on_connected: Callable[[float], None],
        on_end: Callable[[HttpExchange, str | None], None],
    ) -> None:
        self.blocks: list[ReceivedBytes] = []
        self.last_activity = time.perf_counter()
        self._request, self._on_connected, self._on_end = request, on_connected, on_end
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._parts: list[bytes] = []
        self._head_read = self._framed = self._complete = self._ended = False

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        if self._ended:  # given up meanwhile
            transport.abort()
            return
        self._transport = transport
        now = time.perf_counter()
        self._on_connected(now - self.last_activity)
        self.last_activity = now
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep the part of the body that was read now; several of its chunks are one block."""
        self.last_activity = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                self.end(f"no HTTP answer: {error}")
                return
        if self._parts:
            self.blocks.append(ReceivedBytes(self.last_activity, b"".join(self._parts)))
            self._parts.clear()
        if self._complete:
            self.end(self._refusal())

    def connection_lost(self, error: Exception | None) -> None:
        """End an answer whose length nobody said, or one that broke off."""
        if error is not None:
            self.end(why(error))
        else:
            whole = self._head_read and not self._framed
            self.end(self._refusal() if whole else TRUNCATED_ERROR)

    def end(self, reason: str | None) -> None:
        """Close the connection and say how the answer ended; harmless to call again."""
        if not self._ended:
            self.abort()
            self._on_end(self, reason)

    def abort(self) -> None:
        """Close the connection and say nothing any more."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def _refusal(self) -> str | None:
        status = self._parser.get_status_code()
        if status == 200:
            return None
        return f"{status}: {error_text(b''.join(block.data for block in self.blocks))}"

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the head says where the body ends."""
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note that there is a head; one that only promises another is none."""
        self._head_read = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note that the body has ended."""
        self._complete = self._head_read


def why(error: BaseException) -> str:
    """Say an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
