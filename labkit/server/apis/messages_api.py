"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from labkit.models.chat_template import RenderOptions
from labkit.server.apis.generated_choice import GeneratedChoice
from labkit.server.apis.messages_and_responses_base import ConversationWriter, converse
from labkit.server.apis.request_checks import check_model
from labkit.server.apis.requested_tools import RequestedTools, resolve_tools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import ParsedToolCall
from labkit.server.generation.api_generation import Part
from labkit.server.generation.http_response import (
    GenerationResponse,
    json_response,
    named_sse_event,
)
from labkit.server.generation.prompt_encoding import check_contents, encode_conversation
from labkit.server.generation.service import Service
from labkit.server.generation.template_messages import TemplateMessages
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.messages_types import (
    AnyChoice,
    AutoChoice,
    CountTokensRequest,
    MessageError,
    MessageErrorDetail,
    MessageObject,
    MessageParam,
    MessagesRequest,
    MessageUsage,
    NoneChoice,
    TextBlock,
    TextParam,
    TokenCount,
    ToolNameChoice,
    ToolResultParam,
    ToolUseBlock,
    ToolUseParam,
)
from labkit.server.types.openai_types import Function, FunctionName, Sampling
from labkit.server.types.request_decoder import decode

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
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


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Return the response that sends a request's outputs. Raises ``ApiError`` if it is refused."""
    request = decode(_decoder, body)
    messages, tools, options = _conversation(service, request)
    sampling = Sampling(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
    )
    conversation = await converse(
        service,
        "msg",
        messages,
        tools,
        sampling,
        limit=request.max_tokens,
        param="messages",
        compile_grammar=partial(_format_constraint, service, request, tools),
        options=options,
    )
    writer = MessageWriter(service.name, conversation)
    timeout_s = service.options.timeout_s
    return GenerationResponse(conversation.generation, timeout_s, writer, request.stream)


async def count_tokens(service: Service, body: bytes) -> Response:
    """Return the number of tokens of a conversation's prompt, which may exceed the context."""
    request = decode(_count_decoder, body)
    messages, tools, options = _conversation(service, request)
    prompt = await encode_conversation(service, messages, tools.definitions, options=options)
    return json_response(TokenCount(len(prompt)))


def _conversation(
    service: Service, request: CountTokensRequest
) -> tuple[list[dict[str, Any]], RequestedTools, RenderOptions]:
    """Return the chat template's messages, the tools, and the template's options."""
    check_model(service, request.model)
    check_contents(service, (message.content for message in request.messages), "messages")
    conversation = TemplateMessages("messages")
    if request.system:
        conversation.add("system", _text(request.system))
    for message in request.messages:
        _add_message(conversation, message)
    last = conversation.messages[-1]
    prefilled = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    options = RenderOptions(not prefilled, prefilled)
    return conversation.messages, _tools(service, request), options


def _tools(service: Service, request: CountTokensRequest) -> RequestedTools:
    functions = [
        Function(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in request.tools or ()
    ]
    choice = request.tool_choice
    single = isinstance(choice, AutoChoice) and bool(choice.disable_parallel_tool_use)
    return resolve_tools(service, functions, _choice_name(request), single_call=single)


async def _format_constraint(
    service: Service, request: CountTokensRequest, tools: RequestedTools
) -> GrammarConstraint | None:
    """Return the grammar of ``output_config.format``, or None if any text is allowed."""
    output_format = request.output_config.format if request.output_config else None
    if output_format is None:
        return None
    tools.check_text_format("output_config.format")
    return await service.grammars.from_schema(output_format.schema, "output_config.format")


def _choice_name(request: CountTokensRequest) -> str | FunctionName:
    choice = request.tool_choice
    if isinstance(choice, ToolNameChoice):
        return FunctionName(choice.name)
    if isinstance(choice, AnyChoice):
        return "required"
    return "none" if isinstance(choice, NoneChoice) else "auto"


def _add_message(conversation: TemplateMessages, message: MessageParam) -> None:
    """Add a message to the template's messages. Each tool result becomes a message of its own."""
    content, is_user = message.content, message.role == "user"
    blocks = [TextParam(text=content)] if isinstance(content, str) else content
    if any(isinstance(block, ToolUseParam if is_user else ToolResultParam) for block in blocks):
        kind = "tool_use" if is_user else "tool_result"
        raise invalid(
            f"messages: a message with role={message.role} must not have {kind} blocks", "messages"
        )
    texts = [block for block in blocks if isinstance(block, TextParam)]
    if is_user and len(texts) < len(blocks):
        _add_results(conversation, blocks)
        return
    conversation.add(message.role, _text(texts))
    for block in blocks:
        if isinstance(block, ToolUseParam):
            conversation.add_call(block.id, block.name, block.input)


def _add_results(conversation: TemplateMessages, blocks: Sequence[Any]) -> None:
    """Add a user message's tool results, failed ones with ``Error:``, and texts, in order."""
    for is_result, group in itertools.groupby(blocks, lambda b: isinstance(b, ToolResultParam)):
        if is_result:
            for block in group:
                text = _text(block.content or "")  # templates have no field for a failure
                result = f"Error: {text}" if block.is_error else text
                conversation.add_result(block.tool_use_id, result)
        else:
            conversation.add("user", _text(list(group)))


def _text(content: str | list[TextParam]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def encode_error(error: ApiError) -> bytes:
    """Return the JSON body of an error response of the Messages API."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return _encode(MessageError(MessageErrorDetail(kind, error.detail.message)))


class MessageWriter(ConversationWriter):
    """Writes the model's reply as a message, whose parts are content blocks."""

    def _reply(self, generated: GeneratedChoice, parts: Sequence[Part]) -> MessageObject:
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

    def _start(self) -> list[bytes]:
        return [_event("message_start", message=self._reply(GeneratedChoice(), []))]

    def _text_start(self, index: int) -> list[bytes]:
        return [_event("content_block_start", index=index, content_block=TextBlock(""))]

    def _text_delta(self, index: int, text: str) -> list[bytes]:
        delta = {"type": "text_delta", "text": text}
        return [_event("content_block_delta", index=index, delta=delta)]

    def _text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        return [_event("content_block_stop", index=index)]

    def _call(self, index: int, call: ParsedToolCall) -> list[bytes]:
        block = ToolUseBlock(call.prefixed_id("toolu"), call.name, msgspec.Raw(b"{}"))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            _event("content_block_start", index=index, content_block=block),
            _event("content_block_delta", index=index, delta=delta),
            _event("content_block_stop", index=index),
        ]

    def _end(self, generated: GeneratedChoice, parts: Sequence[Part]) -> list[bytes]:
        delta = {
            "stop_reason": _stop_reason(generated, parts),
            "stop_sequence": generated.stop,
        }
        usage = {"output_tokens": len(generated.tokens)}
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def encode_error(self, error: ApiError) -> bytes:
        return named_sse_event("error", encode_error(error))


def _block(part: Part) -> TextBlock | ToolUseBlock:
    if isinstance(part, str):
        return TextBlock(part)
    return ToolUseBlock(part.prefixed_id("toolu"), part.name, msgspec.Raw(part.arguments.encode()))


def _stop_reason(generated: GeneratedChoice, parts: Sequence[Part]) -> Any:
    if generated.stop is not None:
        return "stop_sequence"
    if generated.finish_reason == "stop" and any(not isinstance(part, str) for part in parts):
        return "tool_use"
    return STOP_REASONS.get(generated.finish_reason or "")


def _event(name: str, **fields: Any) -> bytes:
    return named_sse_event(name, _encode({"type": name, **fields}))
