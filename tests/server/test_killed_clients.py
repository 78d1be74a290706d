"""Clients that are killed while the server streams to them leave no memory reserved."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

from fake_server import ModelServer
from test_routes import metric

MAX_NUM_SEQS = 2
BODY = {"model": "hybrid", "prompt": [1, 2, 3], "ignore_eos": True}
HEADERS = {"Content-Type": "application/json"}


def begin_stream(server):
    """Return the connection of a stream whose first token has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({**BODY, "max_tokens": 2000, "stream": True})
    connection.request("POST", "/v1/completions", body, HEADERS)
    assert connection.getresponse().readline().startswith(b"data: ")
    return connection


def complete(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({**BODY, "max_tokens": 4})
    connection.request("POST", "/v1/completions", body, HEADERS)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["usage"]["completion_tokens"]


def test_killed_clients_leave_no_state_slots():
    """A request needs a slot for its recurrent states. A leak of each would stop the server.

    Where a process is killed, the system closes its sockets as ``close`` does: with a reset if data
    is left unread.
    """
    with ModelServer("model=hybrid", f"engine.scheduler.max_num_seqs={MAX_NUM_SEQS}") as server:
        for _ in range(MAX_NUM_SEQS + 1):
            for connection in [begin_stream(server) for _ in range(MAX_NUM_SEQS)]:
                connection.close()
            deadline = time.monotonic() + 30
            while metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
                time.sleep(0.01)
            assert metric(server, "vllm:num_requests_running") == 0
        with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
            assert list(pool.map(complete, [server] * MAX_NUM_SEQS)) == [4] * MAX_NUM_SEQS
        assert metric(server, "vllm:kv_cache_usage_perc") < 0.1
