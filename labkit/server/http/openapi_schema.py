"""The OpenAPI 3.1 document, generated from the types of requests and responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from labkit import __version__
from labkit.server.generation.service import Service
from labkit.server.types.api_error import ErrorBody

REF_TEMPLATE = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
ERROR_DESCRIPTIONS = {
    400: "the request is invalid",
    401: "the API key is missing or invalid",
    403: "the Host header has a name that is not this server's",
    404: "no such model",
    409: "requests are running",
    408: "the request did not arrive in time",
    413: "the body is too long",
    415: "a request with an Origin header is not JSON",
    429: "the server is full",
    431: "the head of the request is too long",
    500: "the engine failed",
    503: "the engine cannot serve",
    504: "the request timed out",
}
POST_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504)


@dataclass(frozen=True)
class PostRoute:
    """A POST route."""

    path: str  # the URL's path
    # Coroutine function that returns the response to a request body.
    respond: Callable[[Service, bytes], Awaitable[Response]]
    # request_type, response_type: types of the request's and the response's body.
    request_type: type[msgspec.Struct]
    response_type: type[msgspec.Struct]
    error: type[msgspec.Struct] = ErrorBody  # type of an error response's body


@dataclass(frozen=True)
class BodylessRoute:
    """A route whose requests have no body.

    ``response_type`` is the type of the response's body, or None if the response is plain text.
    """

    path: str
    respond: Callable[[Request], Awaitable[Response]]
    response_type: type[msgspec.Struct] | None
    error_statuses: tuple[int, ...] = ()
    method: str = "get"


def openapi_document(
    post_routes: list[PostRoute], bodyless_routes: list[BodylessRoute], model: str
) -> dict[str, Any]:
    """Return the OpenAPI document. ``model`` is the only model name that requests may contain."""
    types = {route.request_type for route in post_routes} | {
        route.response_type for route in post_routes
    }
    types |= {route.error for route in post_routes} | {
        route.response_type for route in bodyless_routes if route.response_type
    }
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda struct: struct.__name__), ref_template=REF_TEMPLATE
    )
    for route in post_routes:
        fields = schemas[route.request_type.__name__]["properties"]
        if "model" in fields:
            optional = "model" not in schemas[route.request_type.__name__].get("required", [])
            fields["model"] = {"enum": [model, *([None] if optional else [])]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "labkit", "version": __version__},
        "paths": {
            **{route.path: {"post": _post(route)} for route in post_routes},
            **{route.path: {route.method: _bodyless(route)} for route in bodyless_routes},
        },
        "components": {"schemas": schemas},
    }


def _post(route: PostRoute) -> dict[str, Any]:
    content = _content(route.response_type)
    if "stream" in route.request_type.__struct_fields__:  # of server-sent events
        content[EVENTS] = {"schema": EVENT_SCHEMA}
    return {
        "requestBody": {"required": True, "content": _content(route.request_type)},
        "responses": {
            "200": {"description": "the response", "content": content},
            **_errors(POST_ERRORS, route.error),
        },
    }


def _bodyless(route: BodylessRoute) -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    response = {
        "description": "the response",
        "content": text if route.response_type is None else _content(route.response_type),
    }
    operation: dict[str, Any] = {
        "responses": {"200": response, **_errors((403, *route.error_statuses), ErrorBody)}
    }
    if "{model}" in route.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _errors(error_statuses: Any, error: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        str(status): {"description": ERROR_DESCRIPTIONS[status], "content": _content(error)}
        for status in error_statuses
    }


def _content(body_type: type[msgspec.Struct]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REF_TEMPLATE.format(name=body_type.__name__)}}}
