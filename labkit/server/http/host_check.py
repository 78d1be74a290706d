"""The check of the ``Host`` header, against DNS rebinding.

A web page can let its own name point to this machine. The browser then takes the server for a part
of that page's site and asks no further, but still sends the page's name as ``Host``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from labkit import config
from labkit.server.types.api_error import ApiError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]*)(:\d*)?")


class HostCheck:
    """Middleware that refuses requests for names that are not this server's (403).

    IP addresses, ``localhost`` and ``server.host`` always are: no page can have such a name.
    Without ``server.hosts``, only requests to a loopback address are checked. Requests without
    ``Host`` pass, because browsers send it. ``error_response`` returns the response for an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: config.Server,
        error_response: Callable[[Request, ApiError], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._names = {"localhost", options.host.lower(), *options.host_names}
        self._only_loopback = options.hosts is None
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or refuse it."""
        app = self._app
        for name, value in scope.get("headers", ()):
            if (
                name == b"host"
                and value
                and not self._serves(value.decode("latin-1").lower(), scope)
            ):
                text = f"Host: {value.decode('latin-1')}: not a name of this server (server.hosts)"
                app = await self._error_response(Request(scope), ApiError(403, text))
        await app(scope, receive, send)

    def _serves(self, host: str, scope: Scope) -> bool:
        match = HOST.fullmatch(host)
        name = match[1].removesuffix(".") if match else ""
        return (
            name in self._names
            or name.endswith(".localhost")
            or _address(name.strip("[]")) is not None
            or "*" in self._names
            or (self._only_loopback and not _is_loopback(scope["server"][0]))
        )


@lru_cache(maxsize=64)
def _is_loopback(text: str) -> bool:
    address = _address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
