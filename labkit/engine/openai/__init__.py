"""``engine=openai``: an OpenAI-compatible server, driven over HTTP as an arm of an experiment."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import config
from labkit.config.package_extras import require_packages

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import InferenceEngine


def check_http_extra() -> None:
    """Raise ``ConfigError`` if the HTTP client's libraries are not installed."""
    require_packages(("httptools", "uvloop"), "http", "engine=openai")


def check_installed(options: config.Engine) -> None:
    """Raise ``ConfigError`` (one line) unless what a server to be started needs is installed."""
    from labkit.engine.openai import server_process

    if options.server.url is not None:
        return
    missing = server_process.missing_program(options)
    config.require(
        missing is None,
        f"{options.server.started_by}: the program {missing} is not installed; "
        "install it, name it in engine.server.command or engine.server.python, or set "
        "engine.server.url",
    )
    server = options.server
    own = not (server.packages or server.python or server.command)
    if own and server.server_preset.package is not None:
        package, extra = server.server_preset.package
        require_packages((package,), extra, server.started_by)
    if "{gguf}" in options.server.start_command:
        from labkit.models.gguf.gguf_writer import check_package

        check_package()


def prepare(options: config.Engine, model_dir: Path) -> None:
    """Check, build and export what the server needs, or raise ``ConfigError`` (one line)."""
    from labkit.engine.openai import server_process

    check_installed(options)
    if options.server.url is None:
        if options.server.packages:
            server_process.build_environment(options.server)
        server_process.build_command(options, model_dir, port=0)


def create(options: config.Engine, model_dir: Path) -> InferenceEngine:
    """Start the server, wait for a token, and return an engine, or raise ``EngineError``."""
    check_http_extra()
    from labkit.engine.openai import server_process
    from labkit.engine.openai.http_client import HttpClient
    from labkit.engine.openai.remote_engine import RemoteEngine
    from labkit.engine.openai.request_payload import ENDPOINT_PATHS, PayloadBuilder
    from labkit.models.model_directory import inspect
    from labkit.models.tokenizer import Detokenizer

    server_options = options.server
    with ExitStack() as cleanup:  # unless everything succeeds
        server = server_process.start_server(options, model_dir)
        cleanup.callback(server.stop)
        client = HttpClient(server.url, server_options.silence_s, server_options.api_key)
        cleanup.callback(client.close)
        model = server.wait_until_ready(client, ENDPOINT_PATHS[server_options.api], model_dir)
        directory = inspect(model_dir, name=model_dir.name, option="engine=openai")
        detokenizer = Detokenizer(model_dir)
        payloads = PayloadBuilder(server_options, model, detokenizer, directory.eos_token_ids)
        cleanup.pop_all()
    return RemoteEngine(server, client, payloads, detokenizer, server_options)
