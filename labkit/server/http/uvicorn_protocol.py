"""uvicorn's HTTP/1.1 protocol on httptools, with limits on what a client sends.

In addition to uvicorn's protocol:

- the head of a request is limited in bytes and in headers (431), and a request that is not complete
  in time is refused (408);
- a request that offers an upgrade (HTTP/2 over clear text) is served as HTTP/1.1, with its body;
- a client that has closed its sending half gets its response;
- responses to HTTP/1.0 end with the connection instead of being chunked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from labkit.server.types.api_error import ApiError

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
UPGRADE_TOKENS = (b"upgrade", b"http2-settings")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LEFT_CHECK_S = 0.2  # between checks whether a client that sends no more has gone away


class HeadTooLarge(Exception):
    """The head or the trailers of a request exceed ``MAX_HEAD_BYTES`` or ``MAX_HEADERS``."""


class HttpProtocol(HttpToolsProtocol):
    """A client's connection.

    Each request must arrive within ``receive_timeout_s`` seconds of its start.
    """

    def __init__(self, *args: Any, receive_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout_s = receive_timeout_s
        self._receive_timer: asyncio.TimerHandle | None = None
        self._left_timer: asyncio.TimerHandle | None = None
        self._is_receiving = False  # a part of a request has arrived, but not all of it
        self._sent_all = False  # the client has closed its sending half
        self._num_unparsed_bytes = 0  # given to the parser since it completed a head or body part
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._start_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_receive_timer()
        if self._left_timer is not None:
            self._left_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data from the client."""
        self._unset_keepalive_if_required()
        if not self._is_receiving:
            self._stop_receive_timer()
        self._num_unparsed_bytes += len(data)
        try:
            self._parse(data)
            if self._num_unparsed_bytes > MAX_HEAD_BYTES:
                raise HeadTooLarge
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error
            self._refuse(431 if isinstance(cause, HeadTooLarge) else 400)
        except httptools.HttpParserError:
            self._refuse(400)
        except HeadTooLarge:
            self._refuse(431)
        # A request that arrives at once needs no timer.
        if self._receive_timer is None and (self._is_receiving or not self._is_answering):
            self._start_receive_timer()

    def _parse(self, data: bytes) -> None:
        """Parse data, which may have several requests that offer an upgrade.

        httptools takes what comes after the head of such a request for another protocol's.
        """
        while data and not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parse_without_upgrade()

    def _parse_without_upgrade(self) -> None:
        """Parse the head again without the headers that offer an upgrade."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400)
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in UPGRADE_TOKENS)
            if name not in UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self._num_head_bytes = 0
        self._is_receiving = True

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL."""
        self._num_head_bytes += len(url)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or a trailer."""
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the response, unless the head has to be parsed again."""
        self._num_unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _delimited_by_close(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to the application."""
        self._num_unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._num_unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        self._is_receiving = False
        self._stop_receive_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or close the connection if the client sends no more."""
        super().on_response_complete()
        if self._sent_all and not self.pipeline and not self.transport.is_closing():
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a request has arrived and its response is not complete yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection must stay open, to finish a response.

        A client that only closes its sending half and a client that has disconnected both send
        EOF, so the connection is probed.
        """
        self._sent_all = True
        if not self._is_answering or self.cycle.more_body:
            return False
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)  # a client that is gone answers with a reset
        self._check_left()
        return True

    def _check_left(self) -> None:
        """Drop the connection if the client has reset it, else check again later."""
        peer: socket.socket | None = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or peer is None:
            return
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._left_timer = self.loop.call_later(LEFT_CHECK_S, self._check_left)

    def _start_receive_timer(self) -> None:
        self._receive_timer = self.loop.call_later(self._receive_timeout_s, self._receive_timed_out)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _receive_timed_out(self) -> None:
        """Refuse the incomplete request, unless an earlier request is still being answered."""
        self._receive_timer = None
        if self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.more_body:
            self._start_receive_timer()
        elif self._is_receiving and not (self._is_answering and self.cycle.response_started):
            self._refuse(408)
        else:
            self.transport.close()

    def _refuse(self, status: int) -> None:
        """Send an error, unless a response has started, and close the connection."""
        if not (self._is_answering and self.cycle.response_started):
            error = ApiError(status, REFUSALS[status].format(self._receive_timeout_s))
            body = error.encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


REFUSALS = {
    400: "the request is not valid HTTP",
    408: "the request did not arrive within {:g} s (server.receive_timeout_s)",
    431: f"a request's head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers at most",
}


def _delimited_by_close(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return a replacement for ``cycle.send`` that does not use chunked encoding.

    HTTP/1.0 has no chunks: the end of the connection ends the body.
    """
    send, has_length = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            has_length = b"content-length" in names
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked
