"""The bodies of requests, with limits on each and on all together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from labkit import config
from labkit.server.generation.service import RETRY_AFTER_S
from labkit.server.types.api_error import ApiError


class RequestBodies:
    """Reads bodies, and counts the bytes of those that arrive or are in preparation.

    Together they may have as many bytes as ``server.max_live`` bodies of maximum size: that many
    requests may be in preparation.
    """

    def __init__(self, options: config.Server) -> None:
        self._max_bytes = options.max_body_bytes
        self._max_total_bytes = options.max_live * options.max_body_bytes
        self._num_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read a request's body, which counts until the context ends.

        Raises ``ApiError`` as soon as the body is too long (413), or all of them together (429).
        """
        announced, size = request.headers.get("content-length", "0"), 0
        self._check_size(int(announced) if announced.isdecimal() else 0)
        try:
            parts = []
            async for part in request.stream():
                size += len(part)
                self._num_bytes += len(part)
                self._check_size(size)
                self._check_total()
                parts.append(part)
            body = b"".join(parts)
            del parts
            yield body
        finally:
            self._num_bytes -= size

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            text = f"the body is longer than {self._max_bytes} bytes (server.max_body_bytes)"
            error = ApiError(413, text)
            error.headers["Connection"] = "close"  # the rest may be endless
            raise error

    def _check_total(self) -> None:
        if self._num_bytes > self._max_total_bytes:
            raise ApiError(
                429,
                f"the bodies of the requests that arrive or are in preparation have more than "
                f"{self._max_total_bytes} bytes (server.max_live * server.max_body_bytes)",
                code="queue_full",
                retry_after=RETRY_AFTER_S,
            )
