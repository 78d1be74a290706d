"""The responses of the Messages API: a single JSON body, or the events of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from labkit.server.apis.conversation_generation import Conversation
from labkit.server.apis.generated_choice import GeneratedChoice, collect
from labkit.server.constraints.tool_call_parser import ParsedToolCall
from labkit.server.generation.http_response import named_sse_event
from labkit.server.generation.output_parts import Part, PartStream, has_call, message_parts
from labkit.server.types.api_error import ApiError
from labkit.server.types.messages_types import (
    MessageError,
    MessageErrorDetail,
    MessageObject,
    MessageUsage,
    TextBlock,
    ToolUseBlock,
)

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_encode = msgspec.json.Encoder().encode


def encode_error(error: ApiError) -> bytes:
    """Return the JSON body of an error response of the Messages API."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return _encode(MessageError(MessageErrorDetail(kind, error.detail.message)))


class MessageWriter:
    """Writes the model's reply as a single JSON message or as a stream of events.

    Implements ``PartEvents``: a part is a content block.
    """

    def __init__(self, model: str, conversation: Conversation) -> None:
        self._model = model
        self._conversation = conversation

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        (generated,) = await collect(self._conversation.generation, 1)
        parts = message_parts(generated.text, self._conversation.tools.parser())
        return _encode(self._message(generated, parts))

    def _message(self, generated: GeneratedChoice, parts: Sequence[Part]) -> MessageObject:
        num_cached = self._conversation.generation.num_cached_tokens()
        num_computed = len(self._conversation.prompt) - num_cached
        return MessageObject(
            self._conversation.id,
            self._model,
            [_block(part) for part in parts],
            _stop_reason(generated, parts),
            generated.stop,
            MessageUsage(num_computed, len(generated.tokens), num_cached),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        generated, started = GeneratedChoice(), False
        stream = PartStream(self, self._conversation.tools.parser())
        async for outputs in self._conversation.generation.outputs():
            events = []
            if not started:
                started = True
                empty = self._message(GeneratedChoice(), [])
                events = [_event("message_start", message=empty)]
            for output in outputs:
                generated.add(output)
                events += stream.add(output)
            if events:
                yield b"".join(events)
        last_events = stream.finish(generated.finish_reason)
        last_delta = {
            "stop_reason": _stop_reason(generated, stream.parts),
            "stop_sequence": generated.stop,
        }
        num_tokens = {"output_tokens": len(generated.tokens)}
        last_events += [
            _event("message_delta", delta=last_delta, usage=num_tokens),
            _event("message_stop"),
        ]
        yield b"".join(last_events)

    def text_start(self, index: int) -> list[bytes]:
        return [_event("content_block_start", index=index, content_block=TextBlock(""))]

    def text_delta(self, index: int, text: str) -> list[bytes]:
        delta = {"type": "text_delta", "text": text}
        return [_event("content_block_delta", index=index, delta=delta)]

    def text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        return [_event("content_block_stop", index=index)]

    def call(self, index: int, call: ParsedToolCall) -> list[bytes]:
        block = ToolUseBlock(call.prefixed_id("toolu"), call.name, msgspec.Raw(b"{}"))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            _event("content_block_start", index=index, content_block=block),
            _event("content_block_delta", index=index, delta=delta),
            _event("content_block_stop", index=index),
        ]

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return named_sse_event("error", encode_error(error))


def _block(part: Part) -> TextBlock | ToolUseBlock:
    if isinstance(part, str):
        return TextBlock(part)
    return ToolUseBlock(part.prefixed_id("toolu"), part.name, msgspec.Raw(part.arguments.encode()))


def _stop_reason(generated: GeneratedChoice, parts: Sequence[Part]) -> Any:
    if generated.stop is not None:
        return "stop_sequence"
    if generated.finish_reason == "stop" and has_call(parts):
        return "tool_use"
    return STOP_REASONS.get(generated.finish_reason or "")


def _event(name: str, **fields: Any) -> bytes:
    return named_sse_event(name, _encode({"type": name, **fields}))
