"""HTTP responses in every framing, cut anywhere, complete or failed."""

import socket
import threading
import time

import pytest

from labkit.engine.openai.http_client import HttpClient, HttpExchange

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Wire:
    """A transport that records writes and aborts."""

    def __init__(self):
        self.written, self.aborted = b"", False

    def write(self, data):
        self.written += data

    def abort(self):
        self.aborted = True


@pytest.fixture
def exchange():
    """A connected exchange; ``ended`` collects the errors passed to ``on_end``."""
    connected = HttpExchange(
        b"request", lambda seconds: None, lambda one, reason: one.ended.append(reason)
    )
    connected.ended = []
    connected.wire = Wire()
    connected.connection_made(connected.wire)
    assert connected.wire.written == b"request"
    return connected


def test_bytes_have_the_time_of_the_clock_in_use():
    now = [5.0]
    exchange = HttpExchange(b"", lambda seconds: None, lambda one, reason: None, lambda: now[0])
    exchange.connection_made(Wire())
    now[0] = 7.5
    exchange.data_received(HEAD + b"content-length: 2\r\n\r\nhi")
    assert [part.at for part in exchange.parts] == [7.5]


def bodies(exchange):
    return [part.data for part in exchange.parts]


def test_one_read_is_one_part_whatever_its_http_chunks(exchange):
    exchange.data_received(CHUNKED)
    exchange.data_received(b"3\r\none\r\n3\r\ntwo\r\n")
    exchange.data_received(b"5\r\nthr")
    exchange.data_received(b"ee\r\n0\r\n\r\n")
    assert bodies(exchange) == [b"onetwo", b"thr", b"ee"]
    times = [part.at for part in exchange.parts]
    assert times == sorted(times) and exchange.ended == [None] and exchange.wire.aborted
    exchange.connection_lost(None)
    assert exchange.ended == [None]


def test_a_response_with_a_length_ends_with_it(exchange):
    exchange.data_received(HEAD + b"content-length: 4\r\n\r\nbody")
    assert (bodies(exchange), exchange.ended) == ([b"body"], [None])


def test_a_response_of_unknown_length_ends_with_its_connection(exchange):
    exchange.data_received(HEAD + b"\r\nbo")
    exchange.data_received(b"dy")
    assert exchange.ended == []
    exchange.connection_lost(None)
    assert (bodies(exchange), exchange.ended) == ([b"bo", b"dy"], [None])


@pytest.mark.parametrize("came", [b"", CHUNKED[:20], CHUNKED + b"3\r\none\r\n"])
def test_a_connection_that_ends_before_the_response_is_an_error(exchange, came):
    if came:
        exchange.data_received(came)
    exchange.connection_lost(None)
    assert exchange.ended == ["the connection closed before the response was complete"]


def test_a_broken_connection_is_an_error(exchange):
    exchange.data_received(HEAD + b"\r\n")
    exchange.connection_lost(ConnectionResetError("reset by\npeer"))
    assert exchange.ended == ["reset by peer"]


def test_a_response_that_is_not_http_is_an_error(exchange):
    exchange.data_received(b"SSH-2.0-OpenSSH\r\n")
    (reason,) = exchange.ended
    assert reason.startswith("no HTTP response: ")


def test_an_error_status_gives_the_servers_message(exchange):
    exchange.data_received(b"HTTP/1.1 102 Processing\r\n\r\n")
    assert exchange.ended == []  # it only promises an answer
    body = b'{"error": {"message": "too many"}}'
    exchange.data_received(b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert exchange.ended == ["429: too many"]


def test_an_aborted_exchange_reports_nothing(exchange):
    exchange.data_received(CHUNKED)
    exchange.abort()
    exchange.connection_lost(None)
    assert exchange.ended == [] and exchange.wire.aborted


def test_an_exchange_aborted_before_connecting_sends_nothing():
    exchange, wire = HttpExchange(b"request", lambda s: None, lambda one, reason: None), Wire()
    exchange.abort()
    exchange.connection_made(wire)
    assert wire.aborted and wire.written == b""


def test_a_client_uses_the_path_of_its_url():
    """The URL has a path before ``/v1``; a second request finds nobody listening."""
    listening = socket.create_server(("127.0.0.1", 0))
    port, requests_received = listening.getsockname()[1], []

    def serve():
        connection, _ = listening.accept()
        listening.close()  # before the answer, which lets the second one go
        with connection:
            requests_received.append(connection.recv(1 << 16))
            connection.sendall(HEAD + b"content-length: 2\r\n\r\nhi")

    thread = threading.Thread(target=serve)
    thread.start()
    client = HttpClient(f"http://127.0.0.1:{port}/behind", 5.0, "a-key")
    try:
        first, second = (arrival(client, key) for key in ("first", "second"))
    finally:
        client.close()
        thread.join()
    (request,) = requests_received
    assert request.startswith(b"POST /behind/v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d" % port)
    assert b"\r\nAuthorization: Bearer a-key\r\nConnection: close\r\n" in request
    assert request.endswith(b"\r\n\r\n{}")
    assert (first.error, [part.data for part in first.parts]) == (None, [b"hi"])
    assert "refused" in second.error.lower() and len(client.connect_times_s) == 1


def test_a_clock_that_is_stopped_shows_no_lag_and_no_silence():
    client = HttpClient("http://127.0.0.1:1", silence_s=0.01)
    try:
        client.clock = lambda: 3.0
        client.reset_timings()
        end = time.monotonic() + 5
        while len(client.loop_lags_s) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(client.loop_lags_s) >= 3 and set(client.loop_lags_s[1:]) == {0.0}
    finally:
        client.close()


def arrival(client, key):
    client.send(key, "/v1/completions", b"{}")
    end = time.monotonic() + 5
    while time.monotonic() < end:
        client.wait(0.05)
        for completed in client.completed_responses():
            assert completed.key == key
            return completed
    raise AssertionError("nothing arrived")
