"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from labkit.models.chat_template import RenderOptions
from labkit.server.apis.conversation_generation import converse
from labkit.server.apis.messages_writer import MessageWriter
from labkit.server.apis.request_checks import check_model
from labkit.server.apis.requested_tools import RequestedTools, resolve_tools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.http_response import GenerationResponse
from labkit.server.generation.prompt_encoding import check_contents, encode_conversation
from labkit.server.generation.service import Service
from labkit.server.generation.template_messages import TemplateMessages
from labkit.server.types.api_error import invalid
from labkit.server.types.messages_types import (
    AnyChoice,
    AutoChoice,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    NoneChoice,
    TextParam,
    TokenCount,
    ToolNameChoice,
    ToolResultParam,
    ToolUseParam,
)
from labkit.server.types.openai_types import Function, FunctionName, Sampling
from labkit.server.types.request_decoder import decode

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises ``ApiError`` if the request cannot be served.
    """
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
    timeout_s, generation = service.options.timeout_s, conversation.generation
    if request.stream:
        return GenerationResponse(
            generation, timeout_s, events=writer.events(), encode_error=writer.encode_error_event
        )
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


async def count_tokens(service: Service, body: bytes) -> Response:
    """Return the number of tokens of a conversation's prompt. It may exceed the context length.

    Raises ``ApiError`` if the request is invalid.
    """
    request = decode(_count_decoder, body)
    messages, tools, options = _conversation(service, request)
    prompt = await encode_conversation(service, messages, tools.definitions, options=options)
    encoded = msgspec.json.encode(TokenCount(len(prompt)))
    return Response(encoded, media_type="application/json")


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
    """Add a message to the template's messages. Each tool result becomes a message of its own.

    Raises ``ApiError`` if a user message contains a tool call, an assistant message contains a tool
    result, or a result's id matches no earlier call.
    """
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
    """Add a user message's tool results and texts in the order of its blocks."""
    for is_result, group in itertools.groupby(blocks, lambda b: isinstance(b, ToolResultParam)):
        if is_result:
            for block in group:
                conversation.add_result(block.tool_use_id, _result_text(block))
        else:
            conversation.add("user", _text(list(group)))


def _result_text(result: ToolResultParam) -> str:
    """Return a result's text. If the tool failed, the text begins with ``Error:``.

    Chat templates have no field for a failure.
    """
    text = _text(result.content or "")
    return f"Error: {text}" if result.is_error else text


def _text(content: str | list[TextParam]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
