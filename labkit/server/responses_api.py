"""``/v1/responses``: OpenAI's Responses API for text.

The server does not store responses, so every request must contain the entire conversation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from labkit.server.api_error import ApiError, invalid
from labkit.server.endpoint_helpers import (
    Conversation,
    GeneratedChoice,
    check_model,
    converse,
    decode,
)
from labkit.server.openai_types import JsonObject, Labels, Sampling
from labkit.server.prompt_encoding import check_contents
from labkit.server.response_streams import GenerationResponse, named_sse_event
from labkit.server.serving_service import Service, new_id
from labkit.server.structured_output import GrammarConstraint


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text part of an input message."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text part of the model's message."""

    text: str
    annotations: list[JsonObject] = []
    logprobs: list[JsonObject] | None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation.

    ``id``, ``status`` and ``phase`` are ignored. They are accepted because messages that clients
    copy from earlier responses contain them.
    """

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseTextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The format of unconstrained text."""


class ResponseJsonFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The format of any JSON object."""


class ResponseSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that matches ``schema``. The schema is enforced even if ``strict`` is false."""

    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """The format of the generated text."""

    format: ResponseTextFormat | ResponseJsonFormat | ResponseSchemaFormat | None = None


class ResponsesRequest(Labels, kw_only=True, forbid_unknown_fields=True):
    """The body of a ``POST /v1/responses`` request."""

    model: str
    input: str | Annotated[list[InputMessage], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: bool | None = None
    text: TextOptions | None = None


class OutputMessage(Struct, frozen=True):
    """The message that the model generated."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class InputTokensDetails(Struct, frozen=True):
    """The number of prompt tokens that the prefix cache held when the request started."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """Details of the generated tokens, always 0: the server does not separate reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """The numbers of prompt tokens and of generated tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(Struct, frozen=True):
    """The reason that the model's message is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The response to a ``ResponsesRequest``."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    temperature: float
    top_p: float
    text: JsonObject
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    error: None = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    tool_choice: Literal["auto"] = "auto"
    tools: list[JsonObject] = []


_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    if request.store:
        raise invalid("store=true: this server does not store responses", "store")
    if isinstance(request.input, list):
        check_contents(service, (message.content for message in request.input), "input")
    conversation = await converse(
        service,
        "resp",
        _messages(request),
        Sampling(model=request.model, temperature=request.temperature, top_p=request.top_p),
        limit=request.max_output_tokens,
        param="input",
        constraint=await _constraint(service, request),
    )
    writer = ResponseWriter(service, request, conversation)
    timeout_s, generation = service.options.timeout_s, conversation.generation
    if request.stream:
        return GenerationResponse(
            generation, timeout_s, events=writer.events(), encode_error=writer.encode_error_event
        )
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for message in request.input:
        parts = message.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": text})
    return messages


async def _constraint(service: Service, request: ResponsesRequest) -> GrammarConstraint | None:
    text_format = request.text.format if request.text else None
    if isinstance(text_format, ResponseSchemaFormat):
        return await service.grammars.from_schema(text_format.schema, "text.format")
    if isinstance(text_format, ResponseJsonFormat):
        return await service.grammars.from_schema({"type": "object"}, "text.format")
    return None


class ResponseWriter:
    """Writes the model's reply as a single JSON response or as a stream of events."""

    def __init__(
        self, service: Service, request: ResponsesRequest, conversation: Conversation
    ) -> None:
        self._service = service
        self._request = request
        self._conversation = conversation
        self._message_id = new_id("msg")
        self._sequence = 0

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        generated = GeneratedChoice()
        async for outputs in self._conversation.generation.outputs():
            for output in outputs:
                generated.add(output)
        return _encode(self._response(generated))

    def _response(self, generated: GeneratedChoice | None) -> ResponseObject:
        """Return the response object. Its status is ``in_progress`` if ``generated`` is None."""
        request, prompt = self._request, len(self._conversation.prompt)
        truncated = generated is not None and generated.finish_reason == "length"
        count = len(generated.tokens) if generated else 0
        cached = self._conversation.generation.num_cached_tokens()
        text_format = request.text.format if request.text else None
        return ResponseObject(
            id=self._conversation.id,
            created_at=self._conversation.generation.created,
            model=self._service.name,
            status="in_progress"
            if generated is None
            else "incomplete"
            if truncated
            else "completed",
            output=[] if generated is None else [self._message(generated)],
            usage=None
            if generated is None
            else ResponseUsage(prompt, count, prompt + count, InputTokensDetails(cached)),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            text={"format": msgspec.to_builtins(text_format or ResponseTextFormat())},
            incomplete_details=IncompleteDetails("max_output_tokens") if truncated else None,
        )

    def _message(self, generated: GeneratedChoice) -> OutputMessage:
        status: Any = "incomplete" if generated.finish_reason == "length" else "completed"
        return OutputMessage(self._message_id, status, [OutputText(generated.text)])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        generated, item_place = GeneratedChoice(), {"output_index": 0}
        part_place = {**item_place, "item_id": self._message_id, "content_index": 0}
        started = False
        async for outputs in self._conversation.generation.outputs():
            events = []
            if not started:
                started = True
                empty = OutputMessage(self._message_id, "in_progress", [])
                events += [
                    self._event("response.created", response=self._response(None)),
                    self._event("response.in_progress", response=self._response(None)),
                    self._event("response.output_item.added", item=empty, **item_place),
                    self._event("response.content_part.added", part=OutputText(""), **part_place),
                ]
            for output in outputs:
                generated.add(output)
                if output.text:
                    delta = {**part_place, "delta": output.text, "logprobs": []}
                    events.append(self._event("response.output_text.delta", **delta))
            if events:
                yield b"".join(events)
        done = {**part_place, "text": generated.text, "logprobs": []}
        response = self._response(generated)
        yield b"".join(
            [
                self._event("response.output_text.done", **done),
                self._event(
                    "response.content_part.done", part=OutputText(generated.text), **part_place
                ),
                self._event(
                    "response.output_item.done", item=self._message(generated), **item_place
                ),
                self._event(f"response.{response.status}", response=response),
            ]
        )

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        detail = error.detail
        return self._event("error", message=detail.message, code=detail.type, param=detail.param)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_sse_event(name, _encode(body))
