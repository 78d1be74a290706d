"""Servers on loopback in threads of this process, with a fake engine or a real model."""

import contextlib
import json
import socket
import threading

import pytest
import uvloop
from fake_engine import CharTokenizer, FakeEngine

from labkit import config, serve
from labkit.server import __main__ as command
from labkit.server.generation.service import Service
from labkit.server.http import http_listener
from labkit.server.http.routes import create_app


class FakeModel:
    """The parts of a ``ModelDir`` that the service reads."""

    vocab_size, max_context, eos_token_ids = 128, None, (0,)

    def __init__(self, path):
        self.path = path


class TemplatesHere:
    """Renders conversations in this process, which takes no time to start."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    async def start(self):
        pass

    async def render(self, messages, tools, options):
        return self._tokenizer.render_chat(messages, tools, options)

    async def close(self):
        pass


class LocalServer:
    """A running server of a ``service``."""

    def __init__(self, service):
        self.service = service
        self._socket = http_listener.bind(service.options)
        self.port = self._socket.getsockname()[1]
        self.url = http_listener.url(self._socket)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))

    async def _serve(self):
        app = create_app(self.service)
        self._listener = http_listener.Listener(app, self._ready.set, self.service.options)
        await self.service.start()
        await self._listener.serve(sockets=[self._socket])
        await self.service.stop(0.0)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_):
        self._listener.should_exit = self._listener.force_exit = True
        self._thread.join(30)

    def connect(self):
        """Return a new connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, *pieces, half_close=False):
        """Send bytes; return everything that the server sends until it closes the connection."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    connection.sendall(piece)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    received += part
            return received

    def post(self, path, body, **headers):
        """Post JSON; return the status and the decoded body (None if it is not JSON)."""
        response = self.send(post(path, body, **headers))
        head, _, text = response.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        return status, json.loads(text) if text.startswith(b"{") else text.decode()


class FakeServer(LocalServer):
    """A running server with its ``service``, ``engine`` and ``tokenizer``."""

    def __init__(self, folder, *, engine=None, tokenizer=None, **options):
        self.engine, self.tokenizer = engine or FakeEngine(), tokenizer or CharTokenizer()
        settings = config.Server(port=0, **options)
        service = Service(settings, "fake", self.tokenizer, self.engine, FakeModel(folder))
        service.templates = TemplatesHere(self.tokenizer)
        super().__init__(service)


class ModelServer(LocalServer):
    """A running server of a model and options as the command has them.

    It differs from the command's by its process, whose threads and BLAS are left as they are.
    """

    def __init__(self, *overrides):
        options = serve.compose(["server.port=0", *overrides])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "configure_process", lambda engine: None)
            model, tokenizer, engine = command.load(options)
        name = options.server.model_name or model.name
        takes_priorities = options.engine.scheduler.takes_priorities
        parts = tokenizer, engine, model
        service = Service(options.server, name, *parts, takes_priorities=takes_priorities)
        service.grammars.load_tokenizer()
        super().__init__(service)


def post(path, body, **headers):
    """Return the bytes of a POST request after which the server closes the connection."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(text),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + text
