"""Clients that are killed while the server streams to them leave no memory reserved."""

import http.client
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from test_routes import metric

MAX_NUM_SEQS = 2
BODY = {"model": "hybrid", "prompt": [1, 2, 3], "ignore_eos": True}
HEADERS = {"Content-Type": "application/json"}
# Prints a line when the first token has come, then reads the rest of the stream.
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
connection.request("POST", "/v1/completions", sys.argv[2], json.loads(sys.argv[3]))
response = connection.getresponse()
print(response.readline(), flush=True)
response.read()
"""


def start_client(address):
    body = json.dumps({**BODY, "max_tokens": 2000, "stream": True})
    command = [sys.executable, "-c", CLIENT, address, body, json.dumps(HEADERS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def complete(address):
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({**BODY, "max_tokens": 4})
    connection.request("POST", "/v1/completions", body, HEADERS)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["usage"]["completion_tokens"]


def test_killed_clients_leave_no_state_slots(start_server, tmp_path):
    """A request needs a slot for its recurrent states. A leak of each would stop the server."""
    log = tmp_path / "log"
    with start_server(
        log, "model=hybrid", f"engine.scheduler.max_num_seqs={MAX_NUM_SEQS}"
    ) as server:
        address = urlsplit(server.url).netloc
        for _ in range(MAX_NUM_SEQS + 1):
            clients = [start_client(address) for _ in range(MAX_NUM_SEQS)]
            for client in clients:
                assert client.stdout.readline().startswith(b"b'data: ")
            for client in clients:
                client.send_signal(signal.SIGKILL)
                client.communicate()
            deadline = time.monotonic() + 30
            while metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
                time.sleep(0.01)
            assert metric(server, "vllm:num_requests_running") == 0
        with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
            assert list(pool.map(complete, [address] * MAX_NUM_SEQS)) == [4] * MAX_NUM_SEQS
        assert metric(server, "vllm:kv_cache_usage_perc") < 0.1
