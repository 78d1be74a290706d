"""``/v1/chat/completions``: a conversation, continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from labkit.server.api_error import invalid
from labkit.server.chat_responses import ChatWriter
from labkit.server.openai_types import (
    ChatMessage,
    ChatRequest,
    JsonFormat,
    NamedTool,
    SchemaFormat,
    ToolCall,
)
from labkit.server.response_streams import GenerationResponse
from labkit.server.sampling_translation import (
    check_choices,
    check_model,
    check_stream,
    decode,
    encode_conversation,
    output_tokens,
    to_params,
)
from labkit.server.serving_service import Service, new_id
from labkit.server.structured_output import GrammarConstraint
from labkit.server.tool_calls import ToolCallFormat

Tools = list[dict[str, Any]]
_decoder = msgspec.json.Decoder(ChatRequest)


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Start the generation that a request's body asks for.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    n = check_choices(service, request.n)
    tool_format, tools = _tools(service, request)
    prompt = await encode_conversation(service, plain(request.messages), tools)
    limit = _limit(request)
    most = service.options.max_output_tokens
    max_tokens = output_tokens(service, prompt, limit, default=most, param="messages")
    params = to_params(service, request, max_tokens=max_tokens, logprobs=_logprobs(request))
    constraint = await service.read(_constraint, service, request, tool_format, tools)
    call_id = new_id("chatcmpl")
    generation = service.generate(call_id, [prompt], params, n, constraint)
    writer = ChatWriter(service, request, call_id, generation, prompt, n, tool_format, tools)
    timeout_s = service.options.timeout_s
    if request.stream:
        return GenerationResponse(generation, timeout_s, events=writer.events())
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


def _limit(request: ChatRequest) -> int | None:
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise invalid("max_tokens and max_completion_tokens are one option; give one", "max_tokens")
    return both.pop() if both else None


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs: only with logprobs=true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _tools(service: Service, request: ChatRequest) -> tuple[ToolCallFormat | None, Tools]:
    """Return how calls are written and what may be called; (None, []) where nothing may.

    Raises
    ------
    ApiError
        The model's template has no tools, or the choice names none of them.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice: there are no tools", "tool_choice")
        return None, []
    if request.parallel_tool_calls is False:
        raise invalid("parallel_tool_calls=false: not here", "parallel_tool_calls")
    if choice == "none":
        return None, []
    tool_format = service.call_format
    if tool_format is None:
        raise invalid("tools: the model's chat template has none that are known here", "tools")
    if request.response_format is not None and not _is_text(request):
        raise invalid("response_format: with tools only tool_choice=none", "response_format")
    tools: Tools = [msgspec.to_builtins(tool) for tool in request.tools]
    for tool in tools:
        tool["function"] = {k: v for k, v in tool["function"].items() if v is not None}
    if isinstance(choice, NamedTool):
        named = choice.function.name
        if named not in {tool["function"]["name"] for tool in tools}:
            raise invalid(f"tool_choice: there is no function {named!r}", "tool_choice")
    return tool_format, tools


def _is_text(request: ChatRequest) -> bool:
    return not isinstance(request.response_format, JsonFormat | SchemaFormat)


def _constraint(
    service: Service, request: ChatRequest, tool_format: ToolCallFormat | None, tools: Tools
) -> GrammarConstraint | None:
    """Return what the output must look like; None: anything."""
    choice, wanted = request.tool_choice, request.response_format
    forced = tool_format is not None and (choice == "required" or isinstance(choice, NamedTool))
    if request.ignore_eos and (forced or not _is_text(request)):
        raise invalid("ignore_eos: what has a form has an end", "ignore_eos")
    if tool_format is not None and forced:
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        grammar = tool_format.grammar(tools, service.tokenizer)
        if grammar is None:
            raise invalid("tool_choice: this model's calls cannot be enforced", "tool_choice")
        return service.grammars.from_lark(grammar, "tools")
    if isinstance(wanted, SchemaFormat):
        return service.grammars.from_schema(wanted.json_schema.schema, "response_format")
    if isinstance(wanted, JsonFormat):
        return service.grammars.from_schema({"type": "object"}, "response_format")
    return None


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: contents are texts, arguments objects."""
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None:
        if message.role != "assistant":
            raise invalid(f"messages: a message of role {message.role} needs content", "messages")
        content = message.refusal or ""
    role = "system" if message.role == "developer" else message.role
    generated: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        generated["name"] = message.name
    if message.tool_calls and role == "assistant":
        generated["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        generated["tool_call_id"] = message.tool_call_id
    return generated


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"messages: the arguments of {call.function.name} are no object", "messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
