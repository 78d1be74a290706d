"""Tests of the listening socket: a port has one server."""

import asyncio
import socket

import pytest
from fake_engine import CharTokenizer, FakeEngine
from fake_server import FakeModel

from labkit import config
from labkit.config import ConfigError
from labkit.server.generation.service import Service
from labkit.server.http import http_listener
from labkit.server.http.routes import create_app

IN_USE = r"^server\.port=\d+: Address already in use$"


def test_a_port_that_a_loading_server_has_taken_is_refused_at_once():
    with (
        http_listener.bind(config.Server(port=0)) as first,
        pytest.raises(ConfigError, match=IN_USE),
    ):
        http_listener.bind(config.Server(port=first.getsockname()[1]))


def test_a_server_that_cannot_listen_does_not_say_that_it_serves(tmp_path):
    """Linux lets two sockets bind a port, as both do while connections to it linger."""
    with socket.socket() as other, socket.socket() as bound:
        try:
            for each in (other, bound):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("127.0.0.1", 0) if each is other else other.getsockname())
        except OSError:
            pytest.skip("this system lets one socket bind a port")
        other.listen()
        options = config.Server(port=bound.getsockname()[1])
        engine = FakeEngine()
        service = Service(options, "fake", CharTokenizer(), engine, FakeModel(tmp_path))
        ready = lambda: pytest.fail("it says that it serves")  # noqa: E731
        with pytest.raises(ConfigError, match=IN_USE):
            asyncio.run(http_listener.serve(service, create_app(service), bound, ready))


def test_a_server_restarts_on_its_port_although_connections_linger():
    with http_listener.bind(config.Server(port=0)) as bound:
        http_listener.listen(bound)
        address = bound.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = bound.accept()
            accepted.close()  # the side that closes first keeps the address for a while
            assert client.recv(1) == b""
    with http_listener.bind(config.Server(port=address[1])) as again:
        http_listener.listen(again)
