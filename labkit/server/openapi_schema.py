"""The OpenAPI 3.1 document, derived from the types that decode requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from labkit import __version__
from labkit.server.api_error import ErrorBody
from labkit.server.serving_service import Service

REFERENCE = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
ERROR_DESCRIPTIONS = {
    400: "a mistake in the request",
    401: "no valid API key",
    404: "there is no such model",
    413: "the body is too long",
    429: "the server is full",
    500: "the engine failed",
    503: "the engine cannot serve",
    504: "it took too long",
}


@dataclass(frozen=True)
class PostRoute:
    """A POST route.

    Parameters
    ----------
    path
        The URL's path.
    respond
        Returns the response to a body.
    request_type, response_type
        Types of the bodies of request and response.
    streams
        Whether the response may be a stream of events.
    error
        Type of the body of an error.
    """

    path: str
    respond: Callable[[Service, bytes], Awaitable[Response]]
    request_type: type[msgspec.Struct]
    response_type: type[msgspec.Struct]
    streams: bool = False
    error: type[msgspec.Struct] = ErrorBody


@dataclass(frozen=True)
class GetRoute:
    """A GET route; ``response_type`` is None for plain text."""

    path: str
    response_type: type[msgspec.Struct] | None
    statuses: tuple[int, ...] = ()


def describe(
    post_routes: list[PostRoute], get_routes: list[GetRoute], model: str
) -> dict[str, Any]:
    """Return the document; ``model`` is the only model name that requests may have."""
    types = {item.request_type for item in post_routes} | {
        item.response_type for item in post_routes
    }
    types |= {item.error for item in post_routes} | {
        item.response_type for item in get_routes if item.response_type
    }
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda item: item.__name__), ref_template=REFERENCE
    )
    for item in post_routes:
        fields = schemas[item.request_type.__name__]["properties"]
        if "model" in fields:
            optional = "model" not in schemas[item.request_type.__name__].get("required", [])
            fields["model"] = {"enum": [model, *([None] if optional else [])]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "labkit", "version": __version__},
        "paths": {
            **{item.path: {"post": _post(item)} for item in post_routes},
            **{item.path: {"get": _get(item)} for item in get_routes},
        },
        "components": {"schemas": schemas},
    }


def _post(item: PostRoute) -> dict[str, Any]:
    content = _content(item.response_type)
    if item.streams:
        content[EVENTS] = {"schema": EVENT_SCHEMA}
    return {
        "requestBody": {"required": True, "content": _content(item.request_type)},
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_errors(ERROR_DESCRIPTIONS, item.error),
        },
    }


def _get(item: GetRoute) -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    response = {
        "description": "the answer",
        "content": text if item.response_type is None else _content(item.response_type),
    }
    operation: dict[str, Any] = {
        "responses": {"200": response, **_errors(item.statuses, ErrorBody)},
    }
    if "{model}" in item.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _errors(statuses: Any, error: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        str(status): {"description": ERROR_DESCRIPTIONS[status], "content": _content(error)}
        for status in statuses
    }


def _content(body_type: type[msgspec.Struct]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REFERENCE.format(name=body_type.__name__)}}}
