"""``/v1/responses``: OpenAI's Responses API for text and function calls.

The server does not store responses, so every request must contain the entire conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from labkit.server.apis.generated_choice import GeneratedChoice
from labkit.server.apis.messages_and_responses_base import (
    Conversation,
    ConversationWriter,
    converse,
)
from labkit.server.apis.request_checks import check_model
from labkit.server.apis.requested_tools import RequestedTools, resolve_tools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import ParsedToolCall
from labkit.server.generation.api_generation import Part
from labkit.server.generation.http_response import GenerationResponse, named_sse_event
from labkit.server.generation.prompt_encoding import check_contents
from labkit.server.generation.service import Service, new_id
from labkit.server.generation.template_messages import TemplateMessages, decode_arguments
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.openai_types import FunctionName, Sampling
from labkit.server.types.request_decoder import decode
from labkit.server.types.responses_types import (
    FunctionChoice,
    IncompleteDetails,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseJsonFormat,
    ResponseObject,
    ResponseSchemaFormat,
    ResponsesRequest,
    ResponseTextFormat,
    ResponseUsage,
)

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Return the response that sends a request's outputs. Raises ``ApiError`` if it is refused."""
    request = decode(_decoder, body)
    check_model(service, request.model)
    if request.store:
        raise invalid("store=true: this server does not store responses", "store")
    if isinstance(request.input, list):
        check_contents(service, map(_content, request.input), "input")
    tools = _tools(service, request)
    conversation = await converse(
        service,
        "resp",
        _messages(request),
        tools,
        Sampling(model=request.model, temperature=request.temperature, top_p=request.top_p),
        limit=request.max_output_tokens,
        param="input",
        compile_grammar=partial(_text_constraint, service, request, tools),
    )
    writer = ResponseWriter(service.name, request, conversation)
    timeout_s = service.options.timeout_s
    return GenerationResponse(conversation.generation, timeout_s, writer, request.stream)


def _tools(service: Service, request: ResponsesRequest) -> RequestedTools:
    choice = request.tool_choice
    name = FunctionName(choice.name) if isinstance(choice, FunctionChoice) else choice
    single_call = request.parallel_tool_calls is False
    return resolve_tools(service, request.tools or (), name, single_call=single_call)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation for the chat template."""
    conversation = TemplateMessages("input")
    if request.instructions:
        conversation.add("system", request.instructions)
    if isinstance(request.input, str):
        conversation.add("user", request.input)
        return conversation.messages
    for item in request.input:
        if isinstance(item, InputCall):
            arguments = decode_arguments(item.name, item.arguments, "input")
            conversation.add_call(item.call_id, item.name, arguments)
        elif isinstance(item, InputCallOutput):
            conversation.add_result(item.call_id, _text(item))
        else:
            role = "system" if item.role == "developer" else item.role
            conversation.add(role, _text(item))
    return conversation.messages


def _content(item: InputMessage | InputCall | InputCallOutput) -> Any:
    if isinstance(item, InputCall):
        return item.arguments
    return item.output if isinstance(item, InputCallOutput) else item.content


def _text(item: InputMessage | InputCallOutput) -> str:
    content = _content(item)
    return content if isinstance(content, str) else "".join(part.text for part in content)


async def _text_constraint(
    service: Service, request: ResponsesRequest, tools: RequestedTools
) -> GrammarConstraint | None:
    """Return the grammar of ``text.format``, or None if it allows any text."""
    text_format = request.text.format if request.text else None
    if not isinstance(text_format, ResponseSchemaFormat | ResponseJsonFormat):
        return None
    tools.check_text_format("text.format")
    schema = {"type": "object"}
    if isinstance(text_format, ResponseSchemaFormat):
        schema = text_format.schema
    return await service.grammars.from_schema(schema, "text.format")


class ResponseWriter(ConversationWriter):
    """Writes the model's reply as a response, whose parts are output items."""

    def __init__(self, model: str, request: ResponsesRequest, conversation: Conversation) -> None:
        super().__init__(model, conversation)
        self._request = request
        self._message_ids: dict[int, str] = {}  # by the item's index
        self._sequence = 0

    def _reply(self, generated: GeneratedChoice | None, parts: Sequence[Part]) -> ResponseObject:
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
        """Return the output items. If not ``is_whole``, a text at the end is ``incomplete``."""
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

    def _start(self) -> list[bytes]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._reply(None, [])) for name in names]

    def _text_start(self, index: int) -> list[bytes]:
        item = OutputMessage(self._message_id(index), "in_progress", [])
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._text_event("content_part.added", index, part=OutputText("")),
        ]

    def _text_delta(self, index: int, text: str) -> list[bytes]:
        return [self._text_event("output_text.delta", index, delta=text, logprobs=[])]

    def _text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        item = self._message(index, text, is_whole=is_whole)
        return [
            self._text_event("output_text.done", index, text=text, logprobs=[]),
            self._text_event("content_part.done", index, part=OutputText(text)),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _call(self, index: int, call: ParsedToolCall) -> list[bytes]:
        item, arguments = _call_item(call), call.arguments
        empty = msgspec.structs.replace(item, status="in_progress", arguments="")
        place = {"item_id": item.id, "output_index": index}
        kind = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=empty),
            self._event(f"{kind}.delta", delta=arguments, **place),
            self._event(f"{kind}.done", arguments=arguments, name=call.name, **place),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _end(self, generated: GeneratedChoice, parts: Sequence[Part]) -> list[bytes]:
        response = self._reply(generated, parts)
        return [self._event(f"response.{response.status}", response=response)]

    def encode_error(self, error: ApiError) -> bytes:
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
