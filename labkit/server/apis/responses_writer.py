"""The responses of the Responses API: a single JSON body, or the events of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from labkit.server.apis.conversation_generation import Conversation
from labkit.server.apis.generated_choice import GeneratedChoice, collect
from labkit.server.constraints.tool_call_parser import ParsedToolCall
from labkit.server.generation.http_response import named_sse_event
from labkit.server.generation.output_parts import Part, PartStream, message_parts
from labkit.server.generation.service import new_id
from labkit.server.types.api_error import ApiError
from labkit.server.types.responses_types import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesRequest,
    ResponseTextFormat,
    ResponseUsage,
)

_encode = msgspec.json.Encoder().encode


class ResponseWriter:
    """Writes the model's reply as a single JSON response or as a stream of events.

    Implements ``PartEvents``: a part is an output item.
    """

    def __init__(self, model: str, request: ResponsesRequest, conversation: Conversation) -> None:
        self._model = model
        self._request = request
        self._conversation = conversation
        self._message_ids: dict[int, str] = {}  # by the item's index
        self._sequence = 0

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        (generated,) = await collect(self._conversation.generation, 1)
        parts = message_parts(generated.text, self._conversation.tools.parser())
        return _encode(self._response(generated, parts))

    def _response(self, generated: GeneratedChoice | None, parts: Sequence[Part]) -> ResponseObject:
        """Return the response object. Its status is ``in_progress`` if ``generated`` is None."""
        request, text_format = self._request, self._request.text and self._request.text.format
        truncated = generated is not None and generated.finish_reason == "length"
        status: Any = "incomplete" if truncated else "completed"
        choice, parallel = request.tool_choice, request.parallel_tool_calls
        return ResponseObject(
            id=self._conversation.id,
            created_at=self._conversation.generation.created,
            model=self._model,
            status="in_progress" if generated is None else status,
            output=self._items(parts, is_whole=not truncated),
            usage=None if generated is None else self._usage(generated),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            text={"format": msgspec.to_builtins(text_format or ResponseTextFormat())},
            tool_choice="auto" if choice is None else msgspec.to_builtins(choice),
            tools=msgspec.to_builtins(request.tools or []),
            parallel_tool_calls=parallel is None or parallel,
            incomplete_details=IncompleteDetails("max_output_tokens") if truncated else None,
        )

    def _usage(self, generated: GeneratedChoice) -> ResponseUsage:
        prompt, count = len(self._conversation.prompt), len(generated.tokens)
        cached = InputTokensDetails(self._conversation.generation.num_cached_tokens())
        return ResponseUsage(prompt, count, prompt + count, cached)

    def _items(self, parts: Sequence[Part], *, is_whole: bool) -> list[OutputMessage | OutputCall]:
        """Return the output items.

        If ``is_whole`` is False, a text at the end has the status ``incomplete``.
        """
        last = len(parts) - 1
        return [
            self._message(index, part, is_whole=is_whole or index < last)
            if isinstance(part, str)
            else _call_item(part)
            for index, part in enumerate(parts)
        ]

    def _message(self, index: int, text: str, *, is_whole: bool) -> OutputMessage:
        status: Any = "completed" if is_whole else "incomplete"
        return OutputMessage(self._message_id(index), status, [OutputText(text)])

    def _message_id(self, index: int) -> str:
        return self._message_ids.setdefault(index, new_id("msg"))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        generated, started = GeneratedChoice(), False
        stream = PartStream(self, self._conversation.tools.parser())
        async for outputs in self._conversation.generation.outputs():
            events = []
            if not started:
                started = True
                events = [
                    self._event("response.created", response=self._response(None, [])),
                    self._event("response.in_progress", response=self._response(None, [])),
                ]
            for output in outputs:
                generated.add(output)
                events += stream.add(output)
            if events:
                yield b"".join(events)
        last_events = stream.finish(generated.finish_reason)
        response = self._response(generated, stream.parts)
        last_events.append(self._event(f"response.{response.status}", response=response))
        yield b"".join(last_events)

    def text_start(self, index: int) -> list[bytes]:
        item = OutputMessage(self._message_id(index), "in_progress", [])
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._text_event("content_part.added", index, part=OutputText("")),
        ]

    def text_delta(self, index: int, text: str) -> list[bytes]:
        return [self._text_event("output_text.delta", index, delta=text, logprobs=[])]

    def text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        item = self._message(index, text, is_whole=is_whole)
        return [
            self._text_event("output_text.done", index, text=text, logprobs=[]),
            self._text_event("content_part.done", index, part=OutputText(text)),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def call(self, index: int, call: ParsedToolCall) -> list[bytes]:
        item, arguments = _call_item(call), call.arguments
        empty = msgspec.structs.replace(item, status="in_progress", arguments="")
        place, kind = (
            {"item_id": item.id, "output_index": index},
            "response.function_call_arguments",
        )
        return [
            self._event("response.output_item.added", output_index=index, item=empty),
            self._event(f"{kind}.delta", delta=arguments, **place),
            self._event(f"{kind}.done", arguments=arguments, name=call.name, **place),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        detail = error.detail
        return self._event("error", message=detail.message, code=detail.type, param=detail.param)

    def _text_event(self, name: str, index: int, **fields: Any) -> bytes:
        place = {"item_id": self._message_id(index), "output_index": index, "content_index": 0}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_sse_event(name, _encode(body))


def _call_item(call: ParsedToolCall) -> OutputCall:
    call_id = call.prefixed_id("call")
    return OutputCall(f"fc_{call.id}", "completed", call_id, call.name, call.arguments)
