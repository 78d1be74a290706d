"""The server of a run: started and stopped by labkit, or already running elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import labkit
from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.engine.openai.http_client import CompletedResponse, HttpClient
from labkit.engine.openai.sse_decoder import (
    SSEDecoder,
    StreamChunk,
    StreamError,
    error_text,
    parse_chunk,
)
from labkit.machine import openblas_for_mlx, package_installer, worker_environment
from labkit.machine.exception_text import one_line
from labkit.machine.processes.server_supervisor import SupervisedServer, SupervisorError

POLL_S = 0.05  # between two probes of a starting server
PROBE_TIMEOUT_S = 10.0  # an unanswered probe is cancelled after this, and the next one is sent
PROCESS_TREE_TTL_S = 10.0  # reuse the list of processes for this long: reading it takes 5 ms
PROBE_PROMPT = "Once upon a time"
# Answers that a starting server does not outgrow: redirects, and keys that are missing or wrong.
FINAL_STATUSES = ("301", "302", "303", "307", "308", "401", "403")
# Without the proxies of environment variables and of macOS, which the measured client ignores too.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """A server at ``url``. ``stop`` stops it only if labkit started it.

    ``command``: the configured command, or empty if labkit did not start the server.
    ``recorded_model``: the model's name in requests once the server is ready; ``{model}`` if it is
    the path of the model's directory.

    ``server``: ``engine.server``. ``url``: the server's address, without ``/v1``. ``supervised``:
    the process that labkit started, or None if the server was already running.
    """

    def __init__(
        self, server: config.OpenAIServer, url: str, supervised: SupervisedServer | None
    ) -> None:
        self.url, self.command = url, server.command_line if supervised is not None else ""
        self._options, self._supervised, self.recorded_model = server, supervised, ""
        self._process_tree: list[Any] = []
        self._process_tree_expires = 0.0

    def check_running(self, wait_s: float = 0.0) -> None:
        """Raise ``EngineError`` if the server has ended, or ends within ``wait_s`` seconds."""
        if self._supervised is None:
            return
        deadline = time.monotonic() + wait_s
        while (ended := self._supervised.ended()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if ended is not None:
            raise EngineError(f"{self._option}: the server {ended}")

    @property
    def _option(self) -> str:
        if self._supervised is None:
            return f"engine.server.url={self.url}"
        return self._options.started_by

    def _model_name(self, model_dir: Path) -> str:
        """Return the model's name: the configured or listed one, or the path of ``model_dir``.

        Raises ``EngineError`` if ``/v1/models`` lists several and none has the directory's name,
        path or hub id.
        """
        configured = self._options.model or self._options.server_preset.model
        if configured:
            return configured
        try:
            request = self._request("/v1/models", "GET")
            with DIRECT.open(request, timeout=PROBE_TIMEOUT_S) as response:
                listed = [str(model["id"]) for model in json.load(response)["data"]]
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            listed = []
        if len(listed) < 2:
            return listed[0] if listed else str(model_dir)
        names = set().union(*map(_listed_names, self._model_directories(model_dir)))
        found = next((name for name in listed if name in names), None)
        if found is None:
            raise EngineError(
                f"{self._option}: the server lists {len(listed)} models, none with the name or the "
                f"path of {model_dir}; set engine.server.model to one of {', '.join(listed)}"
            )
        return found

    def _model_directories(self, model_dir: Path) -> Iterator[Path]:
        """Yield the model's directory, and the one that the server was started with."""
        yield model_dir
        if self._supervised is not None and "{model}" in self._options.start_command:
            yield _served_directory(self._options, model_dir)

    def _request(self, path: str, method: str) -> urllib.request.Request:
        key = self._options.api_key
        # No f-strings: there, a text of the environment is its expression.
        headers = {} if key is None else {"Authorization": "Bearer " + key}
        return urllib.request.Request(self.url + path, headers=headers, method=method)

    def wait_until_ready(self, client: HttpClient, path: str, model_dir: Path) -> str:
        """Wait until the server has generated a token; return the model's name in requests.

        An open port, a list of models or a health check does not prove that the server is ready:
        servers with a dead engine have passed all three. Raises ``EngineError`` if the server has
        ended, redirects or refuses the probe, or has generated no token in time. The message
        includes the last probe's error.
        """
        start, tries, last_error = time.monotonic(), 0, "the server accepted no connection"
        limit = self._options.start_limit_s
        chat = path.endswith("/chat/completions")
        prompt = (
            {"messages": [{"role": "user", "content": PROBE_PROMPT}]}
            if chat
            else {"prompt": PROBE_PROMPT}
        )
        usage = {"stream_options": {"include_usage": True}}
        body = {"max_tokens": 1, "temperature": 0.0, "stream": True, **usage, **prompt}
        while time.monotonic() - start < limit:
            self.check_running()
            tries += 1
            remaining = limit - (time.monotonic() - start)
            try:
                model = self._model_name(model_dir)
            except EngineError as error:
                if self._supervised is None:
                    raise
                # A starting server may not list all of its models yet.
                last_error = str(error).removeprefix(f"{self._option}: ")
                time.sleep(POLL_S)
                continue
            payload = {"model": model, **body}
            # At least a second: the last probe's error is reported, so it must not be cut short.
            seconds = min(PROBE_TIMEOUT_S, max(1.0, remaining))
            failure = self._probe(client, f"ready {tries}", path, payload, seconds)
            if failure is None:
                is_path = model in map(str, self._model_directories(model_dir))
                self.recorded_model = "{model}" if is_path else model
                return model
            if failure.partition(":")[0] in FINAL_STATUSES:
                raise EngineError(f"{self._option}: the server does not serve {path}: {failure}")
            last_error = failure
            time.sleep(POLL_S)
        raise EngineError(
            f"{self._option}: the server returned no token within {limit:g} s "
            f"(engine.server.start_timeout_s); try {tries} failed with: {last_error}"
        )

    def _probe(
        self, client: HttpClient, key: str, path: str, body: dict[str, Any], seconds: float
    ) -> str | None:
        """Request one token. Return None if it arrives within ``seconds``, else an error text."""
        client.send(key, path, json.dumps(body).encode())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            client.wait(min(POLL_S, seconds))
            for response in client.completed_responses():
                if response.key == key:  # other responses belong to cancelled probes
                    return _probe_error(response)
            self.check_running()
        client.cancel(key)
        return f"no answer within {seconds:.1f} s"

    def reset_prefix_cache(self) -> None:
        """Empty the server's prefix cache. Raises ``EngineError`` if the server does not do it."""
        request = self._request("/reset_prefix_cache", "POST")
        try:
            DIRECT.open(request, timeout=PROBE_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            reason = error_text(error.read())
        except (OSError, HTTPException) as error:
            reason = one_line(error)
        else:
            return
        raise EngineError(f"{self._option}: the prefix cache was not reset: {reason}")

    def process_memory(self) -> dict[str, float]:
        """Return the ``rss_bytes`` of a started server and its descendants; {} if unknown."""
        import psutil

        if self._supervised is None:
            return {}
        if time.monotonic() >= self._process_tree_expires:
            self._process_tree_expires = time.monotonic() + PROCESS_TREE_TTL_S
            self._process_tree = []
            with contextlib.suppress(psutil.Error):
                server = psutil.Process(self._supervised.pid)
                self._process_tree = [server, *server.children(recursive=True)]
        rss_bytes = 0
        for process in self._process_tree:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                rss_bytes += process.memory_info().rss
        return {"rss_bytes": float(rss_bytes)} if rss_bytes else {}

    def stop(self) -> None:
        if self._supervised is not None:
            self._supervised.stop()


def _listed_names(folder: Path) -> set[str]:
    """Return the names by which a server may list a model: path, last part of it, hub id."""
    names = {str(folder), folder.name}
    if folder.parent.name == "snapshots":  # .../models--ORG--NAME/snapshots/HASH
        names.add(folder.parents[1].name.removeprefix("models--").replace("--", "/"))
    return names


def _probe_error(response: CompletedResponse) -> str | None:
    """Return the reason that a response has no generated token, or None if it has one."""
    if response.error is not None:
        return response.error
    decoder = SSEDecoder()
    try:
        chunks = [parse_chunk(data) for part in response.parts for data in decoder.feed(part.data)]
    except StreamError as error:
        return str(error)
    return None if any(map(_has_token, chunks)) else "the stream has no token"


def _has_token(chunk: StreamChunk) -> bool:
    usage = chunk.usage is not None and chunk.usage.completion > 0
    return bool(chunk.text or chunk.token_ids) or usage


def start_server(options: config.Engine, model_dir: Path) -> ServerProcess:
    """Start the configured server, or connect to the one at ``engine.server.url`` if that is set.

    Raises ``EngineError`` if the command cannot be run, its OpenBLAS cannot be preloaded, or no
    server listens at ``engine.server.url``.
    """
    server = options.server
    if server.url is not None:
        _require_listener(server.url)
        return ServerProcess(server, server.url.rstrip("/").removesuffix("/v1"), None)
    port = free_port()
    command = build_command(options, model_dir, port)
    try:
        supervised = SupervisedServer([*_blas_environment(options), *command])
    except SupervisorError as error:
        raise EngineError(f"{server.started_by}: {error}") from None
    return ServerProcess(server, f"http://127.0.0.1:{port}", supervised)


def _require_listener(url: str) -> None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"engine.server.url={url}: no server listens there ({error.strerror or error}); "
            "start the server, or set its address"
        ) from None


def build_command(options: config.Engine, model_dir: Path, port: int) -> list[str]:
    """Return the server's command and its arguments, with the command's placeholders filled in.

    Placeholders: ``{port}``, ``{model}``, ``{python}``, ``{threads}``, ``{blas}``, ``{labkit}`` and
    ``{gguf}`` (the model, exported to GGUF).
    """
    server, words = options.server, shlex.split(options.server.start_command)
    python = Path(server.python or sys.executable)
    if server.packages:
        python = _environment(server) / "bin" / "python"
    values = {
        "port": str(port),
        "python": str(python),
        "threads": str(options.threads or worker_environment.core_count()),
        "blas": options.blas.value,
        "labkit": str(Path(labkit.__file__).resolve().parent),
    }
    if any("{model}" in word for word in words):
        values["model"] = str(_served_directory(server, model_dir))
    if any("{gguf}" in word for word in words):
        from labkit.engine.model.converted_checkpoints import float32_directory, is_quantized
        from labkit.models.gguf.gguf_writer import export_gguf

        is_packed = is_quantized(model_dir)
        values["gguf"] = str(export_gguf(float32_directory(model_dir) if is_packed else model_dir))
    return [*(word.format(**values) for word in words), *shlex.split(server.args)]


def build_environment(server: config.OpenAIServer) -> None:
    """Build ``engine.server.requirements`` unless cached, or raise ``ConfigError`` (one line)."""
    preset, python = server.server_preset, server.python or sys.executable
    index = preset.index if server.packages == preset.requirements else ""
    try:
        package_installer.build_venv(
            _environment(server), python, server.packages, _removed(server), index
        )
    except package_installer.InstallError as error:
        raise config.ConfigError(f"engine.server.requirements: {error}") from None


def _environment(server: config.OpenAIServer) -> Path:
    python = server.python or sys.executable
    described = ("venv", python, sys.version, server.packages, _removed(server))
    return package_installer.folder_of(*described)


def _removed(server: config.OpenAIServer) -> tuple[str, ...]:
    preset = server.server_preset
    return preset.without if server.packages == preset.requirements else ()


def _served_directory(server: config.OpenAIServer, model_dir: Path) -> Path:
    """Return the directory for ``{model}``: the model's own, or a copy that the server can load."""
    from labkit.engine.model.converted_checkpoints import (
        float32_directory,
        is_quantized,
        mlx_lm_directory,
    )

    preset = server.server_preset
    if server.float32 or (preset.float_weights and is_quantized(model_dir)):
        return float32_directory(model_dir)
    # labkit's own server reads the formats that mlx_lm lacks.
    is_own = server.preset == "labkit" and server.command is None
    return model_dir if is_own else mlx_lm_directory(model_dir)


def _blas_environment(options: config.Engine) -> list[str]:
    """Return an ``env`` command that preloads the arm's OpenBLAS into a server that uses MLX.

    The list is empty if the preset needs no BLAS, the command is the user's own, the system is not
    Linux, or ``engine.blas`` is not openblas. Raises ``EngineError`` if the path of OpenBLAS cannot
    be preloaded.
    """
    preloads = options.server.preloads_blas and options.blas is config.Blas.openblas
    if sys.platform != "linux" or not preloads:
        return []
    threads = options.threads or worker_environment.core_count()
    library = openblas_for_mlx.build_library()
    if re.search(r"[\s:]", str(library)):  # the loader would ignore it and go on
        raise EngineError(
            f"engine.blas=openblas: LD_PRELOAD cannot name {library}; set LABKIT_CACHE to a folder "
            "without spaces and colons in its path"
        )
    return ["env", f"LD_PRELOAD={library}", f"OPENBLAS_NUM_THREADS={threads}"]


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing_program(options: config.Engine) -> str | None:
    """Return the name of the server's program if it is not installed, else None."""
    words = shlex.split(options.server.start_command)
    if not words or options.server.packages:  # the environment is built before the first run
        return None
    is_env = words[0] == "env"
    name = next((word for word in words[is_env:] if not (is_env and "=" in word)), "env")
    name = name.replace("{python}", options.server.python or sys.executable)
    return None if shutil.which(name) else name
