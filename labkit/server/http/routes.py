"""The HTTP routes, the API key check, and the bodies of requests with their limits."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from labkit import __version__, config
from labkit.server.apis import (
    chat_api,
    completions_api,
    messages_api,
    responses_api,
    tokenize_api,
)
from labkit.server.apis.request_checks import check_model
from labkit.server.generation.http_response import (
    GenerationResponse,
    json_response,
    timeout_error,
    wait_for_disconnect,
)
from labkit.server.generation.prometheus_metrics import CONTENT_TYPE
from labkit.server.generation.service import RETRY_AFTER_S, STOPPING, Service
from labkit.server.http.heap_trimming import HeapTrimmer
from labkit.server.http.host_check import HostCheck
from labkit.server.http.openapi_schema import BodylessRoute, PostRoute, openapi_document
from labkit.server.types.api_error import ApiError
from labkit.server.types.messages_types import (
    CountTokensRequest,
    MessageError,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from labkit.server.types.openai_types import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from labkit.server.types.responses_types import ResponseObject, ResponsesRequest


class Health(msgspec.Struct, frozen=True):
    """The body of successful responses to ``GET /health`` and ``POST /reset_prefix_cache``."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The body of ``GET /version``: labkit's version."""

    version: str


MESSAGES_PATH = "/v1/messages"
POST_ROUTES = [
    PostRoute("/v1/completions", completions_api.create_response, CompletionRequest, Completion),
    PostRoute("/v1/chat/completions", chat_api.create_response, ChatRequest, ChatCompletion),
    PostRoute("/v1/responses", responses_api.create_response, ResponsesRequest, ResponseObject),
    PostRoute(
        MESSAGES_PATH, messages_api.create_response, MessagesRequest, MessageObject, MessageError
    ),
    PostRoute(
        f"{MESSAGES_PATH}/count_tokens",
        messages_api.count_tokens,
        CountTokensRequest,
        TokenCount,
        MessageError,
    ),
    PostRoute(
        "/tokenize",
        tokenize_api.tokenize,
        tokenize_api.TokenizeRequest,
        tokenize_api.TokenizeResponse,
    ),
    PostRoute(
        "/detokenize",
        tokenize_api.detokenize,
        tokenize_api.DetokenizeRequest,
        tokenize_api.DetokenizeResponse,
    ),
]


Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(service: Service) -> Starlette:
    """Return the ASGI application of a service."""
    routes, options = Routes(service), service.options
    bodyless = routes.bodyless()
    document = json_response(openapi_document(POST_ROUTES, bodyless, service.name)).body

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    middleware = [Middleware(HostCheck, options=options, error_response=_error_response)]
    if options.cors_origins is not None:
        origins = options.cors_origins.split()
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
            )
        )
    app = Starlette(
        routes=[
            *(routes.post(one.path, routes.post_endpoint(one.respond)) for one in POST_ROUTES),
            *(routes.route(one) for one in bodyless),
            routes.post("/v1/embeddings", routes.embeddings),
            Route("/openapi.json", openapi),
        ],
        middleware=middleware,
        exception_handlers={
            ApiError: _error_response,
            HTTPException: _http_error_response,
            Exception: _internal_error_response,
        },
    )
    app.router.redirect_slashes = False
    return app


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


class Routes:
    """The HTTP endpoints of one ``Service``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._trimmer = HeapTrimmer(lambda: service.num_live > 0)
        self._bodies = RequestBodies(service.options)

    def bodyless(self) -> list[BodylessRoute]:
        """Return the routes whose requests have no body. Monitoring needs no key (401)."""
        return [
            BodylessRoute("/v1/models", self.models, ModelList, (401,)),
            BodylessRoute("/v1/models/{model}", self.model, ModelCard, (401, 404)),
            BodylessRoute("/health", self.health, Health, (503,)),
            BodylessRoute("/version", self.version, Version),
            BodylessRoute("/metrics", self.metrics, None),
            BodylessRoute(
                "/reset_prefix_cache", self.reset_prefix_cache, Health, (401, 409, 503), "post"
            ),
        ]

    def route(self, one: BodylessRoute) -> Route:
        """Return the route of requests without a body. ``GET`` includes ``HEAD``."""
        if one.method == "post":
            return self.post(one.path, one.respond)
        path = one.path.replace("}", ":path}")  # the name of a model may have slashes
        needs_key = 401 in one.error_statuses
        return Route(path, _checked(self.check_key, one.respond) if needs_key else one.respond)

    def post(self, path: str, endpoint: Endpoint) -> Route:
        """Return a route for ``POST`` that checks the key and the media type."""
        return Route(path, _checked(self.check_post, endpoint), methods=["POST"])

    async def check_key(self, request: Request) -> None:
        """Raise ``ApiError`` (401) if the server has an API key and the client does not send it."""
        key = self._service.options.api_key
        if key is None:
            return
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        bearer = scheme.lower() == "bearer"
        sent = credentials.strip() if bearer else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(sent.encode(), key.encode()):
            raise ApiError(
                401,
                "this server needs a valid API key: send 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'",
                code="invalid_api_key",
            )

    async def check_post(self, request: Request) -> None:
        """Check the key, and raise ``ApiError`` (415) if a web page posts anything but JSON.

        Browsers ask the server before they let a page of another origin post JSON. They let any
        page post text or a form without asking.
        """
        await self.check_key(request)
        if all(name != b"origin" for name, _ in request.scope["headers"]):
            return
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(
                415, "a request with an Origin header needs content-type: application/json"
            )

    def post_endpoint(self, respond: Callable[[Service, bytes], Awaitable[Response]]) -> Endpoint:
        """Return an endpoint that reads the request's body and passes it to ``respond``.

        ``respond`` is cancelled when the client disconnects or the request's time is up.
        """

        async def prepare(body: bytes) -> Response:
            with self._service.preparing():  # until its completions count instead
                return await respond(self._service, body)

        async def endpoint(request: Request) -> Response:
            try:
                async with self._bodies.read(request) as body:
                    return await self._in_time(prepare(body), request)
            except ClientDisconnect:
                return Response()  # nobody reads it

        return endpoint

    async def _in_time(
        self, preparing: Coroutine[Any, Any, Response], request: Request
    ) -> Response:
        """Return a response, unless the client disconnects or the request's time is up before."""
        timeout_s, started = self._service.options.timeout_s, time.monotonic()
        responding = asyncio.ensure_future(preparing)
        disconnected = asyncio.ensure_future(wait_for_disconnect(request.receive))
        tasks = {responding, disconnected}
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._trimmer.look_later()
        if not responding.cancelled():
            response = responding.result()
            if isinstance(response, GenerationResponse):
                response.spent_s = time.monotonic() - started
            return response
        if responding in done:  # the service has stopped, and with it the threads that tokenise
            raise ApiError(503, STOPPING)
        if disconnected in done:
            raise ClientDisconnect
        raise timeout_error(timeout_s)

    async def models(self, request: Request) -> Response:
        return json_response(ModelList("list", [self._card()]))

    async def model(self, request: Request) -> Response:
        check_model(self._service, request.path_params["model"])
        return json_response(self._card())

    def _card(self) -> ModelCard:
        service = self._service
        return ModelCard(service.name, "model", service.created, "labkit", service.max_model_len)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Evict the prefix cache. The status is 409 if requests are running or waiting."""
        await self._service.reset_prefix_cache()
        return json_response(Health("ok"))

    async def embeddings(self, request: Request) -> Response:
        raise ApiError(404, "this server does not compute embeddings", code="unsupported")

    async def health(self, request: Request) -> Response:
        reason = self._service.unhealthy_reason()
        if reason is not None:
            raise ApiError(503, reason, code="unhealthy")
        return json_response(Health("ok"))

    async def version(self, request: Request) -> Response:
        return json_response(Version(__version__))

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics_page(), media_type=CONTENT_TYPE)


def _checked(check: Callable[[Request], Awaitable[None]], endpoint: Endpoint) -> Endpoint:
    async def checked(request: Request) -> Response:
        await check(request)
        return await endpoint(request)

    return checked


async def _error_response(request: Request, error: Any) -> Response:
    is_messages = request.scope["path"].startswith(MESSAGES_PATH)
    body = messages_api.encode_error(error) if is_messages else error.encode()
    return Response(body, error.status, headers=error.headers, media_type="application/json")


async def _http_error_response(request: Request, error: Any) -> Response:
    """Answer an error that the framework raised (unknown URL, wrong method) with an API error."""
    if error.status_code == 405:
        text = f"{request.method} {request.scope['path']}: this URL does not support the method"
        api_error = ApiError(405, text, code="method_not_allowed")
        api_error.headers |= dict(error.headers or {})
    elif error.status_code == 404:
        text = f"the URL {request.scope['path']} does not exist"
        api_error = ApiError(404, text, code="unknown_url")
    else:
        api_error = ApiError(400, str(error.detail))
    return await _error_response(request, api_error)


async def _internal_error_response(request: Request, error: Exception) -> Response:
    return await _error_response(
        request, ApiError(500, f"internal server error: {type(error).__name__}")
    )
