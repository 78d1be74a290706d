"""Tests of HTTP as clients and attackers send it, over raw sockets."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, post

from labkit.server.http import uvicorn_protocol
from labkit.server.http.uvicorn_protocol import MAX_HEAD_BYTES, MAX_HEADERS, HttpProtocol

COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 3}
STREAM = {**COMPLETION, "stream": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    with FakeServer(folder, cors_origins="http://a.example") as running:
        yield running


def status(response):
    return int(response.split()[1])


def kept_alive(request):
    """Return a request after which the connection stays open."""
    return request.replace(b"Connection: close\r\n", b"")


@pytest.mark.parametrize(
    "head",
    [
        [b"GET /health HTTP/1.1\r\n", b"X: %s\r\n" % (b"x" * MAX_HEAD_BYTES), b"\r\n"],
        [b"GET /health HTTP/1.1\r\n", b"X: x\r\n" * (MAX_HEADERS + 1), b"\r\n"],
        [b"GET /health HTTP/1.1\r\n", *[b"X: %s\r\n" % (b"x" * 1000)] * 100, b"\r\n"],
        [b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * MAX_HEAD_BYTES)],
        [b"GET /health HTTP/1.1\r\nX: ", *[b"x" * 8192] * 100],
        [
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            *[b"X: %s\r\n" % (b"x" * 1000)] * 100,
        ],
    ],
    ids=["long header", "many headers", "long head", "long URL", "endless header", "trailers"],
)
def test_too_long_heads_are_refused_before_they_are_read(server, head):
    response = server.send(*head)
    assert status(response) == 431 and b"connection: close" in response
    assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_headers_within_the_limits_are_served(server):
    headers = {f"X-{i}": "x" * 100 for i in range(MAX_HEADERS - 4)}
    assert server.post(PATH, COMPLETION, **headers)[0] == 200


HALF_SENT = {
    "method": b"G",
    "header": b"GET /health HTTP/1.1\r\nX: ",
    "body": post(PATH, COMPLETION)[:-5],
    "chunk": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
}


def test_half_sent_requests_time_out_and_connections_without_one_are_closed(tmp_path):
    """All at the same time, because each of them takes as long as a request may take to arrive."""
    sent = {**HALF_SENT, "nothing": b"", "empty line": b"\r\n"}
    with FakeServer(tmp_path, receive_timeout_s=0.2) as server, ThreadPoolExecutor(6) as pool:
        responses = dict(zip(sent, pool.map(server.send, sent.values()), strict=True))
    assert (responses.pop("nothing"), responses.pop("empty line")) == (b"", b"")
    for name, response in responses.items():
        assert status(response) == 408 and b"server.receive_timeout_s" in response, name


def test_a_slow_response_does_not_time_out(tmp_path):
    with FakeServer(tmp_path, receive_timeout_s=0.2) as server:
        server.engine.before_step = lambda: time.sleep(0.1)
        assert server.post(PATH, COMPLETION)[0] == 200  # takes longer than the time to send


def upgrading(request):
    """Add what Java's HttpClient adds to a request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    return request.replace(b"Connection: close\r\n", offer)


@pytest.mark.parametrize("split", [None, 150, -10])
def test_an_upgrade_to_http2_keeps_its_body(server, split):
    request = upgrading(post(PATH, COMPLETION))
    pieces = [request] if split is None else [request[:split], request[split:]]
    with server.connect() as connection:
        for piece in pieces * 2:  # the connection stays usable
            connection.sendall(piece)
            time.sleep(0.01)
        received = b""
        while received.count(b"completion_tokens") < 2:
            received += connection.recv(1 << 16)
    assert received.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pipelined_requests_that_offer_http2_are_all_answered(server, method):
    if method == "POST":
        offer, last = upgrading(post(PATH, COMPLETION)), post(PATH, COMPLETION)
    else:
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        offer = upgrading(last)
    assert server.send(offer * 3 + last).count(b"HTTP/1.1 200 OK") == 4


def test_a_chunked_upgrade_keeps_its_body(server):
    body = json.dumps(COMPLETION).encode()
    request = upgrading(post(PATH, COMPLETION).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    length = b"Content-Length: %d" % len(body)
    request = request.replace(length, b"Transfer-Encoding: chunked")
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert b"HTTP/1.1 200 OK" in server.send(request + chunks, half_close=True)


def test_connect_is_refused(server):
    assert status(server.send(b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 400


@pytest.mark.parametrize("body", [COMPLETION, STREAM], ids=["whole", "streamed"])
def test_a_client_that_closed_its_sending_half_gets_the_answer(server, body):
    server.engine.before_step = lambda: time.sleep(0.1)
    try:
        response = server.send(kept_alive(post(PATH, body)), half_close=True)
    finally:
        server.engine.before_step = lambda: None
    assert b"HTTP/1.1 200 OK" in response
    assert response.count(b'"text":"a"') == 3 or b'"text":"aaa"' in response


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "ahead", [b"", HEALTH, b"x" * (2 * MAX_HEAD_BYTES)], ids=["nothing", "a request", "too much"]
)
def test_a_client_that_is_gone_is_aborted_before_the_answer(server, ahead):
    started, proceed = threading.Event(), threading.Event()
    server.engine.aborted.clear()

    def wait():
        started.set()
        proceed.wait(0.05)

    server.engine.before_step = wait
    try:
        with server.connect() as connection:
            connection.sendall(kept_alive(post(PATH, {**COMPLETION, "max_tokens": 2000})) + ahead)
            assert started.wait(30)
        deadline = time.monotonic() + 30
        while not server.engine.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.engine.aborted and not server.service.num_live
    finally:
        server.engine.before_step = lambda: None


@pytest.mark.parametrize("body", [COMPLETION, STREAM], ids=["whole", "streamed"])
def test_requests_sent_ahead_are_answered_one_after_the_other(server, body):
    """The client closes its sending half while the first response is sent."""
    server.engine.before_step = lambda: time.sleep(0.05)
    received = b""
    try:
        with server.connect() as connection:
            connection.sendall(kept_alive(post(PATH, body)) * 2 + HEALTH)
            if body is STREAM:
                received = connection.recv(1)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
    finally:
        server.engine.before_step = lambda: None
    assert received.count(b"HTTP/1.1 200 OK") == 3 and received.endswith(b'{"status":"ok"}')
    if body is STREAM:
        first, second, _ = received.split(b"HTTP/1.1 ")[1:]  # without 100 Continue between them
        assert first.endswith(b"\r\n0\r\n\r\n") and second.endswith(b"\r\n0\r\n\r\n")


def test_a_request_sent_ahead_has_its_own_time_to_arrive(tmp_path):
    with FakeServer(tmp_path, receive_timeout_s=0.2) as server:
        server.engine.before_step = lambda: time.sleep(0.2)
        response = server.send(kept_alive(post(PATH, STREAM)) + post(PATH, COMPLETION)[:-5])
    first, second = response.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 OK") and first.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert second.startswith(b"408 ")


@pytest.mark.parametrize("split", range(-4, 4))
def test_requests_are_told_apart_wherever_they_are_split(server, split):
    body = json.dumps(COMPLETION, indent=1).replace("\n", "\r\n\r\n").encode()
    head = kept_alive(post(PATH, b"")).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked = head + b"%x\r\n%s\r\n0\r\nX: trailer\r\n\r\n" % (len(body), body)
    sent, at = chunked + kept_alive(post(PATH, body)) + HEALTH, len(chunked) + split
    received = b""
    with server.connect() as connection:
        connection.sendall(sent[:at])
        time.sleep(0.02)
        connection.sendall(sent[at:])
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_too_much_sent_ahead_ends_the_connection_after_the_response(server):
    started, proceed = threading.Event(), threading.Event()
    server.engine.before_step = lambda: (started.set(), proceed.wait(30))
    received = b""
    try:
        with server.connect() as connection:
            connection.sendall(kept_alive(post(PATH, COMPLETION)))
            assert started.wait(30)
            connection.sendall(HEALTH * (2 * MAX_HEAD_BYTES // len(HEALTH)))
            time.sleep(0.1)
            proceed.set()
            while part := connection.recv(1 << 16):
                received += part
    finally:
        server.engine.before_step = lambda: None
    assert received.count(b"HTTP/1.1 ") == 1 and b'"text":"aaa"' in received
    assert b"connection: close" in received


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"], ids=["nothing", "an invalid chunk"])
def test_a_too_long_body_gets_one_response(tmp_path, rest):
    head = post(PATH, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    body = b"800\r\n" + b"x" * 2048 + b"\r\n"
    limits = {"receive_timeout_s": 0.3, "max_body_bytes": 1024}
    with FakeServer(tmp_path, **limits) as server, server.connect() as connection:
        connection.sendall(kept_alive(head) + body)
        response = connection.recv(1 << 16)
        connection.sendall(rest)
        while part := connection.recv(1 << 16):
            response += part
    assert response.count(b"HTTP/1.1 ") == 1
    assert status(response) == 413 and b"connection: close" in response


def test_a_client_that_sends_a_too_long_body_to_its_end_sees_the_response(server):
    with server.connect() as connection:
        connection.sendall(post(PATH, b" " * (32 << 20)))  # fails where the server closes early
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert status(received) == 413


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("connection_header", [b"", b"Connection: close\r\n"])
def test_a_client_that_does_not_read_its_response_is_dropped(
    tmp_path, monkeypatch, connection_header
):
    monkeypatch.setattr(uvicorn_protocol, "READ_CHECK_S", 0.2)
    with FakeServer(tmp_path) as server, server.connect() as connection:
        server.service.metrics_page = lambda: b"x" * (64 << 20)
        connection.sendall(b"GET /metrics HTTP/1.1\r\n" + connection_header + b"\r\n")
        connections = server._listener.server_state.connections
        wait_for(lambda: connections)
        wait_for(lambda: not connections)


def test_a_stream_that_is_not_read_is_aborted(tmp_path, monkeypatch):
    monkeypatch.setattr(uvicorn_protocol, "READ_CHECK_S", 0.2)
    with FakeServer(tmp_path) as server, server.connect() as connection:
        server.engine.before_step = lambda: time.sleep(0.005)
        server.tokenizer.decode = lambda ids: "x" * (len(ids) << 18)
        connection.sendall(post(PATH, {**STREAM, "max_tokens": 10_000}))
        wait_for(lambda: server.engine.aborted)


def test_a_client_that_reads_slowly_is_not_dropped():
    sizes, aborted = [], []
    transport = SimpleNamespace(
        get_write_buffer_size=lambda: sizes.pop(0),
        is_closing=lambda: closing,
        abort=lambda: aborted.append(1),
    )
    protocol = SimpleNamespace(
        transport=transport,
        loop=SimpleNamespace(call_later=lambda seconds, call: None),
        flow=SimpleNamespace(write_paused=False),
        _is_answering=False, _num_unread_bytes=0, _check_read=None,
    )  # fmt: skip

    def is_dropped(*new_sizes):
        sizes[:] = new_sizes
        aborted.clear()
        protocol._num_unread_bytes = 0
        while sizes:
            HttpProtocol._check_read(protocol)
        return bool(aborted)

    closing = False
    assert not is_dropped(0, 0) and not is_dropped(9, 8, 7) and is_dropped(9, 8, 8)
    protocol._is_answering = True  # the size may have grown again
    assert not is_dropped(9, 9)
    protocol.flow.write_paused = True
    assert is_dropped(9, 9)
    protocol.flow.write_paused, closing = False, True
    assert is_dropped(9, 9)


@pytest.mark.parametrize("body", [COMPLETION, STREAM], ids=["whole", "streamed"])
def test_http_1_0_is_not_chunked(server, body):
    response = server.send(post(PATH, body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, content = response.partition(b"\r\n\r\n")
    assert status(response) == 200 and b"transfer-encoding" not in head
    events = content.split(b"\n\n")
    if body is STREAM:
        assert events[-2:] == [b"data: [DONE]", b""] and events[0].startswith(b"data: {")
    else:
        assert json.loads(content)["choices"][0]["text"] == "aaa"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
def test_head(server, path):
    def send(method):
        return server.send(f"{method} {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())

    head, got = send("HEAD"), send("GET")
    assert status(head) == status(got) == 200
    assert head.endswith(b"\r\n\r\n") and not got.endswith(b"\r\n\r\n")
    if path != "/metrics":  # whose length changes
        assert head == got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


ORIGIN = {"Origin": "http://b.example"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**ORIGIN, "Content_Type": "text/plain"}, 415),
        ({**ORIGIN, "Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({**ORIGIN, "Content_Type": ""}, 415),
        ({**ORIGIN, "Content_Type": "application/json; charset=utf-8"}, 200),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 200),  # curl -d
    ],
)
def test_a_page_can_post_json_only(server, headers, expected):
    renamed = {"Content-Type" if k == "Content_Type" else k: v for k, v in headers.items()}
    assert server.post(PATH, COMPLETION, **renamed)[0] == expected


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/health", "/nowhere"])
def test_a_page_whose_name_points_to_this_machine_cannot_call(server, path):
    code, body = server.post(path, COMPLETION, Host="evil.example")
    assert code == 403
    assert body["error"]["message"].startswith("Host: evil.example: ")


def test_a_page_cannot_reset_the_cache(server):
    headers = {**ORIGIN, "Content-Type": "text/plain"}
    assert server.post("/reset_prefix_cache", b"", **headers)[0] == 415


def preflight(server, origin):
    lines = [
        f"OPTIONS {PATH} HTTP/1.1",
        "Connection: close",
        f"Origin: {origin}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization, content-type",
    ]
    return server.send("\r\n".join([*lines, "", ""]).encode())


def test_only_pages_of_the_allowed_origins_may_call(server, tmp_path):
    allowed = preflight(server, "http://a.example")
    assert status(allowed) == 200
    assert b"access-control-allow-origin: http://a.example" in allowed
    refused = preflight(server, "http://b.example")
    assert status(refused) == 400 and b"access-control-allow-origin" not in refused
    with FakeServer(tmp_path) as closed:
        assert b"access-control-allow" not in preflight(closed, "http://a.example")
