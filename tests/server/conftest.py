"""Servers for tests: the real command, on the tiny model with a chat template that has tools."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
sys.path.insert(
    0, str(Path(__file__).parent)
)  # for ``engines`` and ``chat_model``: tests are no packages here


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The tiny model's directory, with a chat template."""
    from chat_model import build

    return build(tmp_path_factory.mktemp("chat") / "tiny-chat")


class Running:
    """A server's process."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def client(self, *, strict=True, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(
            base_url=f"{self.url}/v1", _strict_response_validation=strict, **options
        )

    def stop(self, number=signal.SIGTERM):
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def serving():
    """A context manager: the log's path and overrides to a running server."""
    return _serving


@contextlib.contextmanager
def _serving(log, *overrides):
    """Start ``labkit.serve`` on a free port, wait until it serves, and end it."""
    command = [sys.executable, "-m", "labkit.serve", "server.port=0", *map(str, overrides)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 600  # kernels may have to be compiled
        while not (found := re.search(r"(http://\S+) serves", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Running(process, found.group(1), log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(chat_model, serving, tmp_path_factory):
    """A server of the tiny model that stays for all tests."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(
        log,
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "server.max_output_tokens=512",
        "server.max_live=64",
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's client, which refuses answers that are not as its types say."""
    return server.client()


@pytest.fixture(scope="session")
def lenient(server):
    """The same client for streams of completions.

    Its own type of them wants a ``finish_reason`` in every chunk; the API says null until the
    last, as here.
    """
    return server.client(strict=False)
