"""uvicorn's HTTP/1.1 protocol on httptools, with limits on what a client sends.

In addition to uvicorn's protocol:

- the head of a request is limited in bytes and in headers (431), and a request that is not complete
  in time is refused (408);
- a request that is sent ahead (pipelined) is parsed when the one before has been answered;
- a request that offers an upgrade (HTTP/2 over clear text) is served as HTTP/1.1, with its body;
- a client that has closed its sending half gets its response;
- a client that stops reading is dropped;
- a response that closes the connection leaves it open until its request has arrived, too;
- responses to HTTP/1.0 end with the connection instead of being chunked.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

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
EMPTY_LINES = re.compile(rb"\A(?:\r?\n)+|\n(?:\r\n)+")  # the first: what is before was parsed
LEFT_CHECK_S = 0.2  # between checks whether a client that sends no more has gone away
READ_CHECK_S = 60.0  # between checks whether a client still reads what has been written to it


class HeadTooLarge(Exception):
    """The head or the trailers of a request exceed ``MAX_HEAD_BYTES`` or ``MAX_HEADERS``."""


class HttpProtocol(HttpToolsProtocol):
    """A client's connection. Requests must arrive in ``receive_timeout_s`` seconds each."""

    def __init__(self, *args: Any, receive_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout_s = receive_timeout_s
        self._receive_timer: asyncio.TimerHandle | None = None
        self._left_timer: asyncio.TimerHandle | None = None
        self._is_receiving = False  # a part of a request has arrived, but not all of it
        self._sent_all = False  # the client has closed its sending half
        self._closes_after_request = False  # the response is complete, but not the request
        self._held = bytearray()  # received, but not given to the parser
        self._num_body_bytes = 0  # of a body of known length that are still to be parsed
        self._num_unparsed_bytes = 0  # given to the parser since it completed a head or body part
        self._num_head_bytes = 0
        self._num_unread_bytes = 0  # at the last check, if nothing has been written since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._response_transport = SimpleNamespace(
            write=transport.write, is_closing=transport.is_closing, close=self._close
        )
        self._start_receive_timer()
        self._read_timer = self.loop.call_later(READ_CHECK_S, self._check_read)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self._read_timer.cancel()
        if self._left_timer is not None:
            self._left_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data from the client, or hold it until the current request has been answered."""
        self._unset_keepalive_if_required()
        self._held += data
        self._parse_held()

    def _parse_held(self) -> None:
        """Parse what has been received, at most until a request is complete."""
        if not self._is_receiving:
            self._stop_receive_timer()
        try:
            while self._held and not self._has_request and not self.transport.is_closing():
                self._parse(self._take_piece())
                if self._num_unparsed_bytes > MAX_HEAD_BYTES:
                    raise HeadTooLarge
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error
            self._refuse(431 if isinstance(cause, HeadTooLarge) else 400)
        except httptools.HttpParserError:
            self._refuse(400)
        except HeadTooLarge:
            self._refuse(431)
        if self._has_request:
            if len(self._held) > MAX_HEAD_BYTES:
                self.cycle.keep_alive = False
            if not self.cycle.keep_alive:
                self._held.clear()  # still received, because only a reader sees a disconnect
        # A request that arrives at once needs no timer.
        if self._receive_timer is None and (self._is_receiving or not self._is_answering):
            self._start_receive_timer()

    def _take_piece(self) -> bytes:
        """Remove bytes that are parts of one request from those that are held, and return them.

        httptools parses all that it is given, and does not tell where a request ends. It ends with
        an empty line, unless its body has a known length. More empty lines may follow it.
        """
        size = self._num_body_bytes
        if size <= 0:
            lines = EMPTY_LINES.search(self._held)
            size = len(self._held) if lines is None else lines.end()
        piece = bytes(self._held[:size])
        del self._held[:size]
        return piece

    def _parse(self, piece: bytes) -> None:
        self._num_unparsed_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # httptools takes what comes after the head for another protocol's.
            self._held[:0] = piece[upgrade.args[0] :]
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
        assert not self._is_answering
        super().on_message_begin()
        self.cycle = None  # type: ignore[assignment]  # that of the request before
        self._num_head_bytes = 0
        self._is_receiving = True

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
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
        self.cycle.transport = cast(asyncio.Transport, self._response_transport)
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._num_body_bytes = sum(lengths)  # one at most, or the parser refuses them
        self._num_unread_bytes = 0
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _delimited_by_close(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        self._num_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        self._is_receiving = False
        self._stop_receive_timer()
        super().on_message_complete()
        if self._closes_after_request:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Parse the next request, or close the connection if the client sends no more."""
        super().on_response_complete()
        if self._held and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse_held()
        if self._sent_all and not self._has_request:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a request's head has arrived and its response is not complete yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_request(self) -> bool:
        """Whether an entire request has arrived and its response is not complete yet."""
        return self._is_answering and not self._is_receiving

    def _close(self) -> None:
        """Close the connection as soon as the request has arrived.

        If it is closed while the client sends, the client may see a reset and not the response.
        """
        if self._is_receiving:
            self._closes_after_request = True
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        """Let responses write again: the client has read most of what was written."""
        self._num_unread_bytes = 0
        super().resume_writing()

    def _check_read(self) -> None:
        """Drop the connection if the client has read nothing since the last check.

        Otherwise a client that does not read would keep its response for ever: ``close`` waits
        until everything has been read. While more may be written, the size does not tell whether
        the client reads, but then little is unread.
        """
        size = self.transport.get_write_buffer_size()
        if 0 < self._num_unread_bytes <= size:
            self.transport.abort()
            return
        may_grow = self._is_answering and not self.flow.write_paused
        self._num_unread_bytes = 0 if may_grow and not self.transport.is_closing() else size
        self._read_timer = self.loop.call_later(READ_CHECK_S, self._check_read)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection must stay open, to finish a response.

        A client that only closes its sending half and a client that has disconnected both send
        EOF, so the connection is probed.
        """
        self._sent_all = True
        if not self._has_request:
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
        """Refuse an incomplete request, or close a connection on which none has begun."""
        self._receive_timer = None
        if self._is_receiving and not self.transport.is_closing():
            self._refuse(408)
        else:
            self.transport.close()

    def _refuse(self, status: int) -> None:
        """Send an error, unless the request has a response already, and close the connection."""
        has_response = self.cycle is not None and self.cycle.response_started
        if not (self._is_receiving and has_response):
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
    """Return a ``cycle.send`` for HTTP/1.0, where the connection's end ends the body."""
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
