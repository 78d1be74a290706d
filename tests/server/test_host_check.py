"""Tests of the check of Host headers."""

import asyncio

import pytest
from starlette.responses import Response

from labkit import config
from labkit.server.http.host_check import HostCheck


async def refusal(request, error):
    return Response(str(error), error.status)


def status(options, hosts, address="127.0.0.1"):
    """Return the status of a request with these Host headers that arrives at an address."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/", "server": (address, 80),
        "headers": [(b"host", host.encode("latin-1")) for host in hosts],
    }  # fmt: skip
    check = HostCheck(Response(), config.Server(**options), refusal)
    asyncio.run(check(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "localhost.", "a.localhost", "127.0.0.1:8000", "[::1]:8000",
     "192.168.0.7", "[fe80::1]", ""],
)  # fmt: skip
def test_names_that_no_page_can_have_are_served(host):
    assert status({}, [host]) == status({"hosts": "gpu.example"}, [host], "192.168.0.7") == 200
    assert status({}, []) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil.example/localhost", "evil@localhost", "localhost:8000:1", "[evil]", "\xff"],
)  # fmt: skip
def test_other_names_are_refused_on_loopback(host):
    for address in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"):
        assert status({"host": "0.0.0.0"}, [host], address) == 403
    assert status({}, ["localhost", host]) == 403
    assert status({}, [host], "192.168.0.7") == 200
    assert status({"hosts": "gpu.example"}, [host], "192.168.0.7") == 403
    assert status({"hosts": "*"}, [host]) == 200


def test_the_servers_own_names_are_served():
    for options in ({"host": "GPU.example"}, {"hosts": "x gpu.Example"}):
        assert status(options, ["gpu.example:8000"]) == 200
        assert status(options, ["gpu.example.evil.example"]) == 403
