"""One HTTP request on its own connection, and its response as timestamped bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools

from labkit.engine.openai.sse_decoder import error_text, may_have_content
from labkit.machine.exception_text import one_line

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
        """Send the request."""
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
        """Collect a chunk of the body."""
        self._read_now.append(body)

    def on_message_complete(self) -> None:
        """Record that the body has ended."""
        self._complete = self._has_head
