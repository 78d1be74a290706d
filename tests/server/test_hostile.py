"""Hostile requests to the real server: none ends it, stops it or changes the tokens of others.

``hostile_cases`` has the requests. During and after each of them, the same 16 requests must get the
tokens of an idle server, ``/health`` must answer 200 in time, and memory must come back.
"""

import concurrent.futures
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from hostile_cases import CASES, SCHEMAS, TEMPLATE, chat_schema

pytestmark = pytest.mark.slow
HEALTH_WITHIN_S = 0.5
MEMORY_BYTES = 200 << 20  # after one request; the allocator may keep what a body of 4 MB took
FINAL_MEMORY_BYTES = 100 << 20  # after all of them
GRACE_S = 5.0
NUM_REFERENCES = 16


@dataclass
class Response:
    status: int
    text: str

    def json(self):
        return json.loads(self.text)


class Client:
    """Sends requests to a server. ``options`` are the fields of a request's body."""

    def __init__(self, url):
        self.address = urlsplit(url).netloc

    def chat(self, **options):
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/chat/completions", messages=messages, **options)

    def responses(self, **options):
        return self.post("/v1/responses", input="hello", **options)

    def messages(self, **options):
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/messages", messages=messages, **options)

    def connect(self):
        """Return a connection that the caller must close."""
        host, _, port = self.address.partition(":")
        return socket.create_connection((host, int(port)), timeout=120)

    def post(self, path, **options):
        return self.send("POST", path, json.dumps({"model": "tiny", **options}))

    def send(self, method, path, body=None, timeout=120):
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return Response(response.status, response.read().decode())
        finally:
            connection.close()

    def reference(self, number):
        """Return the token ids of one of the 16 requests."""
        prompt = [(number * 37 + at * 11) % 4000 for at in range(5 + number * 3)]
        response = self.post(
            "/v1/completions", prompt=prompt, max_tokens=24, seed=number, ignore_eos=True,
            return_token_ids=True,
        )  # fmt: skip
        assert response.status == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def references(self):
        """Return the token ids of all 16, sent at once."""
        with concurrent.futures.ThreadPoolExecutor(NUM_REFERENCES) as pool:
            return list(pool.map(self.reference, range(NUM_REFERENCES)))


@contextlib.contextmanager
def health_watch(server, client):
    """Ask for the health all the while; then no answer may be late or other than 200.

    Yields nothing. The time in which the machine ran other processes does not count.
    """
    command = [sys.executable, str(Path(__file__).with_name("health_watch.py")), client.address]
    command.append(str(server.process.pid))
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with watch:
        try:
            yield
        finally:
            output, _ = watch.communicate("", timeout=60)
    answers = json.loads(output)
    late = [answer for answer in answers if answer[1] - answer[2] > HEALTH_WITHIN_S]
    assert answers and late == []
    assert {status for status, _, _ in answers} == {200}


def memory_bytes(pid):
    """Return the resident memory of a process and of the processes that it started."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


@pytest.fixture(scope="module")
def hostile_server(chat_model, start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    model = shutil.copytree(chat_model, folder / "model")
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields["chat_template"] = TEMPLATE + fields["chat_template"]
    path.write_text(json.dumps(fields))
    with start_server(
        folder / "log",
        "model=local",
        f"model.path={model}",
        "server.model_name=tiny",
        "server.grammar_timeout_s=2",
        "server.receive_timeout_s=5",
        f"server.grace_s={GRACE_S}",
        "engine.batch_invariant=true",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(hostile_server):
    """The tokens of the 16 requests on the idle server, after which it has allocated its memory."""
    client = Client(hostile_server.url)
    tokens = client.references()
    assert len({tuple(ids) for ids in tokens}) == NUM_REFERENCES
    chat_schema({"type": "object"})(client)  # starts the process that tries grammars
    CASES["a_quarter_of_a_million_log_probabilities"](client)  # touches 12,000 tokens' KV memory
    hostile_server.memory_bytes = memory_bytes(hostile_server.process.pid)
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_request_changes_nothing_for_others(name, hostile_server, expected):
    client = Client(hostile_server.url)
    before = memory_bytes(hostile_server.process.pid)
    with health_watch(hostile_server, client):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            hostile = pool.submit(CASES[name], client)
            assert client.references() == expected
            hostile.result()
        assert client.references() == expected
    assert memory_bytes(hostile_server.process.pid) - before < MEMORY_BYTES
    assert "Traceback" not in hostile_server.log.read_text()


def test_the_server_stops_in_time_although_grammars_compile(hostile_server, expected):
    client = Client(hostile_server.url)
    grown = memory_bytes(hostile_server.process.pid) - hostile_server.memory_bytes
    assert grown < FINAL_MEMORY_BYTES
    threads = [
        threading.Thread(target=try_to_send, args=(client, number), daemon=True)
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    process = psutil.Process(hostile_server.process.pid)
    assert process.children()
    children, started = process.children(recursive=True), time.monotonic()
    assert hostile_server.stop() == 0
    assert time.monotonic() - started < GRACE_S
    assert psutil.wait_procs(children, timeout=2)[1] == []


def try_to_send(client, number):
    schema = {**SCHEMAS["intersection_of_20"], "title": f"stop {number}"}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert client.chat(response_format=response_format).status == 503
