"""``/v1/messages``: Anthropic's Messages API for text, with that API's error object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from labkit.models.chat_template import RenderOptions
from labkit.server.api_error import ApiError
from labkit.server.endpoint_helpers import (
    Conversation,
    GeneratedChoice,
    check_model,
    converse,
    decode,
)
from labkit.server.openai_types import Sampling, TextPart
from labkit.server.prompt_encoding import check_contents
from labkit.server.response_streams import GenerationResponse, named_sse_event
from labkit.server.serving_service import Service

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageParam(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[TextPart]


class UserMetadata(Struct, forbid_unknown_fields=True):
    """An identifier of the user, which the server ignores."""

    user_id: str | None = None


class MessagesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a ``POST /v1/messages`` request."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextPart] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class TextBlock(Struct, frozen=True):
    """A text block of the model's message."""

    text: str
    type: Literal["text"] = "text"


class MessageUsage(Struct, frozen=True):
    """The numbers of prompt tokens and of generated tokens.

    As in Anthropic's API, ``input_tokens`` does not count the prompt tokens that were read from
    the cache.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(Struct, frozen=True):
    """The response to a ``MessagesRequest``."""

    id: str
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageErrorDetail(Struct, frozen=True):
    """An error's type (for example ``rate_limit_error``) and message."""

    type: str
    message: str


class MessageError(Struct, frozen=True):
    """The body of an error response, which is any response with a status other than 200."""

    error: MessageErrorDetail
    type: Literal["error"] = "error"


_decoder = msgspec.json.Decoder(MessagesRequest)
_encode = msgspec.json.Encoder().encode


def encode_error(error: ApiError) -> bytes:
    """Return the JSON body of an error response of the Messages API."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return _encode(MessageError(MessageErrorDetail(kind, error.detail.message)))


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_contents(service, (message.content for message in request.messages), "messages")
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    messages += [{"role": m.role, "content": _text(m.content)} for m in request.messages]
    sampling = Sampling(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
    )
    last = messages[-1]
    prefilled = last["role"] == "assistant" and bool(last["content"])
    conversation = await converse(
        service,
        "msg",
        messages,
        sampling,
        limit=request.max_tokens,
        param="messages",
        options=RenderOptions(not prefilled, prefilled),
    )
    writer = MessageWriter(service.name, conversation)
    timeout_s, generation = service.options.timeout_s, conversation.generation
    if request.stream:
        return GenerationResponse(
            generation, timeout_s, events=writer.events(), encode_error=writer.encode_error_event
        )
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageWriter:
    """Writes the model's reply as a single JSON message or as a stream of events."""

    def __init__(self, model: str, conversation: Conversation) -> None:
        self._model = model
        self._conversation = conversation

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        generated = GeneratedChoice()
        async for outputs in self._conversation.generation.outputs():
            for output in outputs:
                generated.add(output)
        return _encode(self._message(generated, [TextBlock(generated.text)]))

    def _message(self, generated: GeneratedChoice, content: list[TextBlock]) -> MessageObject:
        num_cached = self._conversation.generation.num_cached_tokens()
        num_computed = len(self._conversation.prompt) - num_cached
        return MessageObject(
            self._conversation.id,
            self._model,
            content,
            _stop_reason(generated),
            generated.stop,
            MessageUsage(num_computed, len(generated.tokens), num_cached),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        generated, started = GeneratedChoice(), False
        async for outputs in self._conversation.generation.outputs():
            events = []
            if not started:
                started = True
                empty = self._message(GeneratedChoice(), [])
                events = [
                    _event("message_start", message=empty),
                    _event("content_block_start", index=0, content_block=TextBlock("")),
                ]
            for output in outputs:
                generated.add(output)
                if output.text:
                    delta = {"type": "text_delta", "text": output.text}
                    events.append(_event("content_block_delta", index=0, delta=delta))
            if events:
                yield b"".join(events)
        last_delta = {"stop_reason": _stop_reason(generated), "stop_sequence": generated.stop}
        yield b"".join(
            [
                _event("content_block_stop", index=0),
                _event(
                    "message_delta",
                    delta=last_delta,
                    usage={"output_tokens": len(generated.tokens)},
                ),
                _event("message_stop"),
            ]
        )

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return named_sse_event("error", encode_error(error))


def _stop_reason(generated: GeneratedChoice) -> Any:
    if generated.stop is not None:
        return "stop_sequence"
    return STOP_REASONS.get(generated.finish_reason or "")


def _event(name: str, **fields: Any) -> bytes:
    return named_sse_event(name, _encode({"type": name, **fields}))
