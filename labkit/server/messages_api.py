"""``/v1/messages``: Anthropic's form of a conversation, text only, with its own error object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from labkit.server.api_error import ApiError
from labkit.server.openai_types import Sampling, TextPart
from labkit.server.response_streams import GenerationResponse, named_event
from labkit.server.sampling_translation import (
    Conversation,
    GeneratedChoice,
    check_model,
    converse,
    decode,
)
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
    """Who asks; it changes nothing."""

    user_id: str | None = None


class MessagesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``."""

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


class TextBlock(Struct, frozen=True):
    """A part of what the model says."""

    text: str
    type: Literal["text"] = "text"


class MessageUsage(Struct, frozen=True):
    """Tokens read and written."""

    input_tokens: int
    output_tokens: int


class MessageObject(Struct, frozen=True):
    """The answer to a ``MessagesRequest``."""

    id: str
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageErrorDetail(Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str


class MessageError(Struct, frozen=True):
    """The body of every answer that is not 200."""

    error: MessageErrorDetail
    type: Literal["error"] = "error"


_decoder = msgspec.json.Decoder(MessagesRequest)
_encode = msgspec.json.Encoder().encode


def encode_error(error: ApiError) -> bytes:
    """Return an error as this API says it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return _encode(MessageError(MessageErrorDetail(kind, error.detail.message)))


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Start the generation that a request's body asks for.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    said = [{"role": "system", "content": _text(request.system)}] if request.system else []
    said += [{"role": m.role, "content": _text(m.content)} for m in request.messages]
    sampling = Sampling(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
    )
    conversation = await converse(
        service, "msg", said, sampling, limit=request.max_tokens, param="messages"
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
    """Writes a conversation's answer as a message, whole or as its events."""

    def __init__(self, model: str, conversation: Conversation) -> None:
        self._model = model
        self._conversation = conversation

    async def full_body(self) -> bytes:
        """Return the answer in one piece."""
        generated = GeneratedChoice()
        async for pieces in self._conversation.generation.pieces():
            for piece in pieces:
                generated.add(piece)
        return _encode(self._message(generated, [TextBlock(generated.text)]))

    def _message(self, generated: GeneratedChoice, content: list[TextBlock]) -> MessageObject:
        prompt = len(self._conversation.prompt)
        return MessageObject(
            self._conversation.id,
            self._model,
            content,
            _stop_reason(generated),
            generated.stop,
            MessageUsage(prompt, len(generated.tokens)),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as the API's events, each step's together."""
        generated, begun = GeneratedChoice(), False
        async for pieces in self._conversation.generation.pieces():
            sent = []
            if not begun:
                begun = True
                blank = self._message(GeneratedChoice(), [])
                sent = [
                    _event("message_start", message=blank),
                    _event("content_block_start", index=0, content_block=TextBlock("")),
                ]
            for piece in pieces:
                generated.add(piece)
                if piece.text:
                    delta = {"type": "text_delta", "text": piece.text}
                    sent.append(_event("content_block_delta", index=0, delta=delta))
            if sent:
                yield b"".join(sent)
        ended = {"stop_reason": _stop_reason(generated), "stop_sequence": generated.stop}
        yield b"".join(
            [
                _event("content_block_stop", index=0),
                _event(
                    "message_delta", delta=ended, usage={"output_tokens": len(generated.tokens)}
                ),
                _event("message_stop"),
            ]
        )

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which has begun."""
        return named_event("error", encode_error(error))


def _stop_reason(generated: GeneratedChoice) -> Any:
    if generated.stop is not None:
        return "stop_sequence"
    return STOP_REASONS.get(generated.finish_reason or "")


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, _encode({"type": name, **fields}))
