"""What goes wrong, as the OpenAI API says it: a status and one object."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: ``param`` names the option at fault, ``code`` the mistake."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not 200."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that cannot be answered.

    Parameters
    ----------
    status
        The HTTP status.
    message
        One line for whoever sent it.
    param, code
        The option at fault and the API's word for the mistake, where there is one.
    retry_after
        Seconds after which it is worth trying again.
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
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(" ".join(message.split()), TYPES[status], param, code)
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def encode(self) -> bytes:
        """Return the body."""
        return msgspec.json.encode(ErrorBody(self.detail))


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a mistake in the request (400)."""
    return ApiError(400, message, param=param, code=code)
