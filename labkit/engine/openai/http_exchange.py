"""One HTTP request on its own connection, and its response as timestamped bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools

from labkit.engine.openai.sse_decoder import error_text
from labkit.machine.exception_text import one_line

TRUNCATED_ERROR = "the connection ended before the response did"


class ReceivedBytes(NamedTuple):
    """The part of a response body that one read returned, ``at`` on ``time.perf_counter``."""

    at: float
    data: bytes


class HttpExchange(asyncio.Protocol):
    """Sends a request when connected, and collects the response until it ends.

    ``parts``: the body as it was read. ``last_activity``: when bytes last arrived, or the exchange
    began (``time.perf_counter``).

    Parameters
    ----------
    request
        Head and body, ready to be sent.
    on_connected
        Called once with the seconds that connecting took.
    on_end
        Called once when the response has ended, with None or one line that says why it failed.
    """

    def __init__(
        self,
        request: bytes,
        on_connected: Callable[[float], None],
        on_end: Callable[[HttpExchange, str | None], None],
    ) -> None:
        self.parts: list[ReceivedBytes] = []
        self.last_activity = time.perf_counter()
        self._request, self._on_connected, self._on_end = request, on_connected, on_end
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._read_now: list[bytes] = []  # body chunks of the current read
        self._has_head = self._has_length = self._complete = self._ended = False

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        if self._ended:  # aborted while it was connecting
            transport.abort()
            return
        self._transport = transport
        now = time.perf_counter()
        self._on_connected(now - self.last_activity)
        self.last_activity = now
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Store the body bytes of one read with its time; several HTTP chunks become one part."""
        self.last_activity = time.perf_counter()
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
        """End the response: whole if its head gave no length, else truncated."""
        if error is not None:
            self.end(one_line(error))
        else:
            is_whole = self._has_head and not self._has_length
            self.end(self._status_error() if is_whole else TRUNCATED_ERROR)

    def end(self, error: str | None) -> None:
        """Close the connection and call ``on_end``; may be called again."""
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
        return f"{status}: {error_text(b''.join(part.data for part in self.parts))}"

    # Callbacks of httptools' parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the head tells where the body ends."""
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note that the final head is read; status 1xx announces another one."""
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        """Collect a chunk of the body."""
        self._read_now.append(body)

    def on_message_complete(self) -> None:
        """Note that the body has ended."""
        self._complete = self._has_head
