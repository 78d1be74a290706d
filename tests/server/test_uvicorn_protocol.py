"""Tests of HTTP as clients and attackers send it, over raw sockets."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_server import FakeServer, post

from labkit.server.http.uvicorn_protocol import MAX_HEAD_BYTES, MAX_HEADERS

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
        response = server.send(post(PATH, body).replace(b"Connection: close\r\n", b""),
                               half_close=True)  # fmt: skip
    finally:
        server.engine.before_step = lambda: None
    assert b"HTTP/1.1 200 OK" in response
    assert response.count(b'"text":"a"') == 3 or b'"text":"aaa"' in response


def test_a_client_that_is_gone_is_aborted_before_the_answer(server):
    started, proceed = threading.Event(), threading.Event()

    def wait():
        started.set()
        proceed.wait(0.05)

    server.engine.before_step = wait
    try:
        with server.connect() as connection:
            connection.sendall(post(PATH, {**COMPLETION, "max_tokens": 2000}))
            assert started.wait(30)
        deadline = time.monotonic() + 30
        while not server.engine.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.engine.aborted and not server.service.num_live
    finally:
        server.engine.before_step = lambda: None


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
