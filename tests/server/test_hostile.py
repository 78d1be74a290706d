"""Hostile requests to the real server: none ends it, stops it or changes the tokens of others.

``hostile_cases`` has the requests. During and after each of them, the same 16 requests must get the
tokens of an idle server, ``/health`` must answer 200 in time, and memory must come back.
"""

import concurrent.futures
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hostile_cases import CASES, SCHEMAS, chat_schema
from hostile_client import (
    HEALTH_WITHIN_S,
    NUM_REFERENCES,
    Client,
    add_hostile_template,
    memory_bytes,
)

pytestmark = pytest.mark.slow
MEMORY_BYTES = 200 << 20  # after one request; the allocator may keep what a body of 4 MB took
FINAL_MEMORY_BYTES = 100 << 20  # after all of them
GRACE_S = 5.0


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
    assert {status for status, *_ in answers} == {200}


@pytest.fixture(scope="module")
def hostile_server(chat_model, start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    model = add_hostile_template(shutil.copytree(chat_model, folder / "model"))
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
