"""The API's own description (OpenAPI 3.1), from the very types that requests are read with."""

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
    """An address that a body is posted to.

    ``asked`` and ``told`` are the types of the body and of the answer; ``streams``: the answer
    may be a stream of events.
    """

    path: str
    answer: Callable[[Service, bytes], Awaitable[Response]]
    asked: type[msgspec.Struct]
    told: type[msgspec.Struct]
    streams: bool = False
    error: type[msgspec.Struct] = ErrorBody


@dataclass(frozen=True)
class GetRoute:
    """An address that is read; ``told`` is the type of the answer, None: plain text."""

    path: str
    told: type[msgspec.Struct] | None
    statuses: tuple[int, ...] = ()


def describe(posted: list[PostRoute], got: list[GetRoute], model: str) -> dict[str, Any]:
    """Return the document; ``model`` is the one that requests may name."""
    types = {item.asked for item in posted} | {item.told for item in posted}
    types |= {item.error for item in posted} | {item.told for item in got if item.told}
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda item: item.__name__), ref_template=REFERENCE
    )
    for item in posted:
        fields = schemas[item.asked.__name__]["properties"]
        if "model" in fields:
            optional = "model" not in schemas[item.asked.__name__].get("required", [])
            fields["model"] = {"enum": [model, *([None] if optional else [])]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "labkit", "version": __version__},
        "paths": {
            **{item.path: {"post": _post(item)} for item in posted},
            **{item.path: {"get": _get(item)} for item in got},
        },
        "components": {"schemas": schemas},
    }


def _post(item: PostRoute) -> dict[str, Any]:
    content = _content(item.told)
    if item.streams:
        content[EVENTS] = {"schema": EVENT_SCHEMA}
    return {
        "requestBody": {"required": True, "content": _content(item.asked)},
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_errors(ERROR_DESCRIPTIONS, item.error),
        },
    }


def _get(item: GetRoute) -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    answer = {
        "description": "the answer",
        "content": text if item.told is None else _content(item.told),
    }
    found: dict[str, Any] = {
        "responses": {"200": answer, **_errors(item.statuses, ErrorBody)},
    }
    if "{model}" in item.path:
        found["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return found


def _errors(statuses: Any, error: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        str(status): {"description": ERROR_DESCRIPTIONS[status], "content": _content(error)}
        for status in statuses
    }


def _content(told: type[msgspec.Struct]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REFERENCE.format(name=told.__name__)}}}
