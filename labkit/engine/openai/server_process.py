"""The server of a run: started fresh and kept to the run's life, or one that runs already."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import labkit
from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.engine.openai.http_client import CompletedResponse, HttpClient
from labkit.engine.openai.sse_decoder import DONE, SSEDecoder, StreamError, parse_chunk
from labkit.machine import openblas_for_mlx, worker_environment
from labkit.machine.server_supervisor import SupervisedServer, SupervisorError

POLL_S = 0.05  # between two tries to reach a server that starts
PROBE_TIMEOUT_S = 10.0  # a try that is not answered within this is given up, and another made
PROCESS_TREE_TTL_S = (
    10.0  # for which its processes are known: who descends from whom takes 5 ms to find out
)
PROBE_PROMPT = "Once upon a time"


class ServerProcess:
    """A server that has an address; ``kept`` is None where it ran already.

    ``words``: its command as it is written in the config.
    """

    def __init__(self, server: config.Opponent, url: str, kept: SupervisedServer | None) -> None:
        self.url, self.words = url, server.words if kept is not None else ""
        self._server, self._kept = server, kept
        self._family: list[Any] = []  # its processes, as they were looked up
        self._family_until = 0.0

    def check_running(self) -> None:
        """Raise ``EngineError`` where the server has ended."""
        ended = None if self._kept is None else self._kept.ended()
        if ended is not None:
            raise EngineError(f"{self._called}: the server {ended}")

    @property
    def _called(self) -> str:
        if self._kept is None:
            return f"engine.server.url={self.url}"
        return f"engine.server.preset={self._server.preset}"

    def _model_name(self, model_dir: Path) -> str:
        """Return what requests call the model: as configured, or the first that is listed."""
        named = self._server.model or self._server.known.model
        if named:
            return named
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=PROBE_TIMEOUT_S) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return str(model_dir)

    def wait_until_ready(self, client: HttpClient, path: str, model_dir: Path) -> str:
        """Return what requests call the model, once the server has generated a token of it.

        An open port, a list of models or a healthy answer prove nothing: all of them have been
        seen over an engine that was dead.

        Raises
        ------
        EngineError
            It has ended, or has not generated one in time; with what it said last.
        """
        start_server, tries, said = time.monotonic(), 0, "it took no connection"
        limit = self._server.start_timeout_s
        chat = path.endswith("/chat/completions")
        asked = (
            {"messages": [{"role": "user", "content": PROBE_PROMPT}]}
            if chat
            else {"prompt": PROBE_PROMPT}
        )
        usage = {"stream_options": {"include_usage": True}}
        body = {"max_tokens": 1, "temperature": 0.0, "stream": True, **usage, **asked}
        while time.monotonic() - start_server < limit:
            self.check_running()
            tries += 1
            left = limit - (time.monotonic() - start_server)
            model = self._model_name(model_dir)
            named = {"model": model, **body}
            # At least a second: the last try says what is wrong, and one cut short does not know.
            seconds = min(PROBE_TIMEOUT_S, max(1.0, left))
            answer = self._try(client, f"ready {tries}", path, named, seconds)
            if answer is None:
                return model
            said = answer
            time.sleep(POLL_S)
        raise EngineError(
            f"{self._called}: no token within {limit:g} s (engine.server.start_timeout_s); the "
            f"last of {tries} tries: {said}"
        )

    def _try(
        self, client: HttpClient, key: str, path: str, body: dict[str, Any], seconds: float
    ) -> str | None:
        """Ask for one token; return None when it has come, else what came instead."""
        client.send(key, path, json.dumps(body).encode())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            client.wait(min(POLL_S, seconds))
            for arrival in client.completed_responses():
                if arrival.key == key:  # else it is of a try that was given up
                    return _probe_error(arrival)
            self.check_running()
        client.cancel(key)
        return f"no answer within {seconds:.0f} s"

    def memory(self) -> dict[str, float]:
        """Return what the server and all that descends from it hold, by the system's count."""
        import psutil

        if self._kept is None:
            return {}
        if time.monotonic() >= self._family_until:
            self._family, self._family_until = [], time.monotonic() + PROCESS_TREE_TTL_S
            with contextlib.suppress(psutil.Error):
                server = psutil.Process(self._kept.pid)
                self._family = [server, *server.children(recursive=True)]
        held = 0
        for one in self._family:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                held += one.memory_info().rss
        return {"rss_bytes": float(held)} if held else {}

    def stop(self) -> None:
        """Stop a server that was started here, with all that descends from it."""
        if self._kept is not None:
            self._kept.stop()


def _probe_error(arrival: CompletedResponse) -> str | None:
    """Say what an answer lacks of being one with a token; None: nothing."""
    if arrival.error is not None:
        return arrival.error
    events = SSEDecoder()
    try:
        said = [parse_chunk(data) for block in arrival.blocks for data in events.feed(block.data)]
    except StreamError as error:
        return str(error)
    generated = any(
        one is not DONE and bool(one.text or one.token_ids or (one.usage and one.usage.completion))
        for one in said
    )
    return None if generated else "a stream without a token"


def start_server(options: config.Engine, model_dir: Path) -> ServerProcess:
    """Start the server that ``options`` describe, or name the one that runs already.

    Raises
    ------
    EngineError
        It cannot be started.
    """
    server = options.server
    if server.url is not None:
        _require_listener(server.url)
        return ServerProcess(server, server.url.rstrip("/").removesuffix("/v1"), None)
    port = free_port()
    command = build_command(options, model_dir, port)
    try:
        kept = SupervisedServer([*_blas_environment(options), *command])
    except SupervisorError as error:
        raise EngineError(f"engine.server.preset={server.preset}: {error}") from None
    return ServerProcess(server, f"http://127.0.0.1:{port}", kept)


def _require_listener(url: str) -> None:
    """Raise ``EngineError`` at once where nobody listens at a kept server's address."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"engine.server.url={url}: nobody listens there ({error.strerror or error})"
        ) from None


def build_command(options: config.Engine, model_dir: Path, port: int) -> list[str]:
    """Return a server's command, word by word, with everything filled in."""
    server, words = options.server, shlex.split(options.server.words)
    known = {
        "port": str(port),
        "model": str(model_dir),
        "python": server.python or sys.executable,
        "threads": str(options.threads or worker_environment.core_count()),
        "labkit": str(Path(labkit.__file__).resolve().parent),
    }
    if any("{gguf}" in word for word in words):
        from labkit.models.gguf.gguf_writer import export_gguf

        known["gguf"] = str(export_gguf(model_dir))
    return [word.format(**known) for word in words]


def _blas_environment(options: config.Engine) -> list[str]:
    """Return what sets the variables by which MLX multiplies as the arm says (Linux)."""
    server = options.server
    multiplies = server.known.multiplies_by_blas and server.command is None
    if sys.platform != "linux" or not multiplies or options.blas is not config.Blas.openblas:
        return []
    count = options.threads or worker_environment.core_count()
    return [
        "env",
        f"LD_PRELOAD={openblas_for_mlx.build_library()}",
        f"OPENBLAS_NUM_THREADS={count}",
    ]


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing_program(options: config.Engine) -> str | None:
    """Name the program that a server needs and that is not here; None: nothing is missing."""
    words = shlex.split(options.server.words)
    if options.server.url is not None or not words:
        return None
    name = words[0].replace("{python}", options.server.python or sys.executable)
    return None if shutil.which(name) else name
