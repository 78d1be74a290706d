"""Errors of the OpenAI API: an HTTP status and a JSON object."""

from __future__ import annotations

import traceback

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """The ``error`` object.

    ``param`` names the invalid request parameter. ``code`` is the API's error code, for example
    ``model_not_found``.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON body of an error response (any status other than 200)."""

    error: ErrorDetail


class ApiError(Exception):
    """An error to send to the client.

    Line breaks in the message become spaces, and a long message loses its middle: what the client
    sent may be in it, and what is allowed is at its end. ``param``, the name of the invalid request
    parameter, is shortened too. ``code`` is the API's error code. The client may retry after
    ``retry_after`` seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.status = status
        param = param and _shortened(param)
        self.detail = ErrorDetail(message, ERROR_TYPES_BY_STATUS[status], param, code)
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def encode(self) -> bytes:
        """Return the error response's JSON body."""
        return msgspec.json.encode(ErrorBody(self.detail))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 350 else f"{line[:240]} ... {line[-100:]}"


ERROR_TYPES_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


def internal_error(error: BaseException) -> ApiError:
    """Return an ``ApiError`` with status 500 for an exception that the server does not expect.

    The exception's traceback is written to standard error. Its message is not sent, because it may
    contain the content of other requests.
    """
    traceback.print_exception(error)
    return ApiError(500, f"internal server error: {type(error).__name__}")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an ``ApiError`` with status 400 (invalid request)."""
    return ApiError(400, message, param=param, code=code)
