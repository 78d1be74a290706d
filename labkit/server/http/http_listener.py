"""The listening socket, the uvicorn server on it, and the signals that stop it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from errno import EADDRNOTAVAIL

import uvicorn
from starlette.applications import Starlette

from labkit import config
from labkit.config import ConfigError
from labkit.server.generation.service import Service
from labkit.server.http.uvicorn_protocol import HttpProtocol

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
CLOSE_S = 1.0  # until connections that are still open when the service has stopped are dropped


def bind(options: config.Server) -> socket.socket:
    """Return a socket bound to the server's address. It does not listen until ``serve`` runs.

    The port is taken at once, so that a second server on it fails before it loads its model. Raises
    ``ConfigError`` if the address or port is not available.
    """
    host, port = options.host, options.port
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"server.host={host}: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        try:
            bound.bind(address)
        except OSError:  # possibly only connections of an earlier server, which still linger
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except OSError as error:
        bound.close()
        option = f"server.host={host}" if error.errno == EADDRNOTAVAIL else f"server.port={port}"
        raise ConfigError(f"{option}: {error.strerror}") from None
    return bound


def listen(bound: socket.socket) -> None:
    """Listen on a bound socket.

    With ``SO_REUSEADDR``, Linux lets several sockets bind one port until one of them listens.
    Raises ``ConfigError`` if another server listens on the port by now.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections inherit it
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"server.port={bound.getsockname()[1]}: {error.strerror}") from None


def url(bound: socket.socket) -> str:
    """Return the server's URL, for example ``http://127.0.0.1:8000``."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener(uvicorn.Server):
    """A uvicorn server without signal handlers that calls ``on_ready`` as soon as it listens."""

    def __init__(
        self, app: Starlette, on_ready: Callable[[], None], options: config.Server
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(HttpProtocol, receive_timeout_s=options.receive_timeout_s),  # type: ignore[arg-type]
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def drop_connections(self) -> None:
        """Drop the connections that are still open, and let their requests end."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=CLOSE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers as they are, because ``serve`` installs its own."""
        yield


async def serve(
    service: Service, app: Starlette, bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT arrives or the engine fails, then shut down.

    After the first signal, the server refuses new requests and gives running and waiting requests
    ``server.grace_s`` seconds to finish. A second signal ends these requests immediately. When no
    request is left, connections have another ``CLOSE_S`` seconds to close; those that are still
    open, for example because half a request has arrived, are then dropped. Raises ``ConfigError``
    if another server has taken the port meanwhile.
    """
    listen(bound)
    listener = Listener(app, on_ready, service.options)
    stopping: list[asyncio.Task[None]] = []

    async def shut_down(grace_s: float) -> None:
        listener.should_exit = True
        await service.stop(grace_s)
        await asyncio.sleep(CLOSE_S)
        await listener.drop_connections()
        listener.force_exit = True

    def stop(*, at_once: bool = False) -> None:
        grace_s = 0.0 if at_once or stopping else service.options.grace_s
        stopping.append(asyncio.ensure_future(shut_down(grace_s)))

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    await service.start(on_engine_failure=lambda: stop(at_once=True))
    try:
        await listener.serve(sockets=[bound])
    finally:
        for task in stopping:
            task.cancel()
        await service.stop(0.0)


def run(
    service: Service, app: Starlette, bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Run ``serve`` in a new uvloop event loop until the server has stopped."""
    import uvloop

    uvloop.run(serve(service, app, bound, on_ready))
