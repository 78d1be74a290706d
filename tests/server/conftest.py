"""Fixtures of servers: the real command, on the tiny model with a chat template for tools."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("openai")
# Tests are not a package; this makes ``fake_engine`` and ``chat_model`` importable.
sys.path.insert(0, str(Path(__file__).parent))

import api_client


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The directory of the tiny model with a chat template."""
    from chat_model import build

    return build(tmp_path_factory.mktemp("chat") / "tiny-chat")


class ServerProcess:
    """A running ``labkit.serve`` process."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def client(self, **options):
        return api_client.connect(self.url, **options)

    def stop(self, signum=signal.SIGTERM):
        """Send a signal and return the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def start_server():
    """A context manager that runs a server, given a log's path and overrides."""
    return _run_server


@pytest.fixture(scope="session")
def tiny_server(chat_model):
    """A function from overrides to a server of the tiny model in this process."""
    from fake_server import ModelServer

    def make(*overrides):
        model = f"model.path={chat_model}"
        return ModelServer("model=local", model, "server.model_name=tiny", *overrides)

    return make


@contextlib.contextmanager
def _run_server(log, *overrides):
    """Start ``labkit.serve`` on a free port, wait until it serves, and kill it at the end."""
    command = [sys.executable, "-m", "labkit.serve", "server.port=0", *map(str, overrides)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 600  # kernels may have to be compiled
        while not (match := re.search(r"(http://\S+) serves", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield ServerProcess(process, match.group(1), log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(chat_model, start_server, tmp_path_factory):
    """A server of the tiny model that all tests share."""
    log = tmp_path_factory.mktemp("server") / "log"
    with start_server(
        log,
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "server.max_output_tokens=512",
        "server.max_live=64",
        "engine.prefix_cache=hash",
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's client, which refuses responses that do not match its types."""
    return server.client()


@pytest.fixture(scope="session")
def lenient_client(server):
    """OpenAI's client without strict validation, for streamed completions.

    The client's type requires a ``finish_reason`` in every chunk; OpenAI's API, as this server,
    sends null in all but the last.
    """
    return server.client(strict=False)
