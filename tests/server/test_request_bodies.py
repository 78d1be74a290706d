"""Tests of the limit on the bodies of all requests together."""

import json
import time

import pytest
from fake_server import FakeServer, post
from test_uvicorn_protocol import COMPLETION, PATH, status


def send_until(server, body, expected):
    """Send a request again and again until it has the expected status; return the response."""
    deadline = time.monotonic() + 30
    while status(response := server.send(post(PATH, body))) != expected:
        assert time.monotonic() < deadline, response
    return response


@pytest.mark.parametrize("ending", ["completed", "disconnected"])
def test_bodies_that_arrive_are_limited_together(tmp_path, ending):
    body = json.dumps({**COMPLETION, "user": "x" * 900}).encode()
    with FakeServer(tmp_path, max_live=2, max_body_bytes=1024) as server:
        clients = [server.connect() for _ in range(2)]
        for client in clients:
            client.sendall(post(PATH, body)[:-1])
        refused = send_until(server, body, 429)
        assert b"2048 bytes (server.max_live * server.max_body_bytes)" in refused
        assert b"retry-after: 1" in refused
        for client in clients:
            if ending == "completed":
                client.sendall(body[-1:])
                assert status(client.recv(1 << 16)) == 200
            client.close()
        send_until(server, body, 200)
