"""``/v1/chat/completions``: generates the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from labkit.models.chat_template import Message, RenderOptions
from labkit.server.apis.chat_writer import ChatWriter
from labkit.server.apis.generated_choice import check_prompt_logprobs
from labkit.server.apis.request_checks import (
    check_free_length,
    check_model,
    check_stream,
    min_output,
    min_tokens_constraint,
    num_choices,
    requested_priority,
    structured_grammar,
    to_params,
)
from labkit.server.apis.requested_tools import RequestedTools, resolve_tools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.http_response import GenerationResponse
from labkit.server.generation.prompt_encoding import (
    check_contents,
    encode_conversation,
    resolve_max_tokens,
)
from labkit.server.generation.service import Service, new_id
from labkit.server.generation.template_messages import decode_arguments, template_call
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import (
    ChatMessage,
    ChatRequest,
    JsonFormat,
    NamedTool,
    SchemaFormat,
)
from labkit.server.types.request_decoder import decode

_decoder = msgspec.json.Decoder(ChatRequest)


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Return the response that sends a request's outputs. Raises ``ApiError`` if it is refused."""
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    n = num_choices(service, request.n)
    priority = requested_priority(service, request.priority)
    prompt, tools = await encode_prompt(service, request)
    requested = _requested_max_tokens(request)
    max_tokens = resolve_max_tokens(
        service, prompt, requested, param="messages", min_tokens=min_output(request, requested)
    )
    logprobs = _requested_logprobs(request)
    check_prompt_logprobs([prompt], n, request.prompt_logprobs)
    params = to_params(
        service,
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    grammar = await _constraint(service, request, tools)
    constraint = grammar or min_tokens_constraint(service, request, max_tokens)
    call_id = new_id("chatcmpl")
    generation = service.generate(
        call_id, [prompt], params, n, constraint, tools.single_call_parser, priority=priority
    )
    writer = ChatWriter(service, request, call_id, generation, prompt, n, tools)
    return GenerationResponse(generation, service.options.timeout_s, writer, request.stream)


async def encode_prompt(service: Service, request: ChatRequest) -> tuple[list[int], RequestedTools]:
    """Return the token ids of a request's prompt, and the tools that the model may call.

    Raises ``ApiError`` if the messages, the tools or the options of the template are invalid.
    """
    check_contents(service, _contents(request.messages), "messages")
    tools = _tools(service, request)
    messages = _template_messages(request.messages)
    options = _render_options(request, messages)
    return await encode_conversation(service, messages, tools.definitions, options=options), tools


def _requested_max_tokens(request: ChatRequest) -> int | None:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid(
            "max_tokens and max_completion_tokens differ; set only one of them", "max_tokens"
        )
    return limits.pop() if limits else None


def _render_options(request: ChatRequest, messages: Sequence[Message]) -> RenderOptions:
    """Return the template's options. The model continues a last message of the assistant's."""
    last, continues = messages[-1], request.continue_final_message
    is_text = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    if continues is None:
        continues = is_text and request.add_generation_prompt is None
    if continues and not is_text:
        raise invalid(
            "continue_final_message=true: the last message must be the assistant's and have text",
            "continue_final_message",
        )
    begins_message = request.add_generation_prompt
    try:
        return RenderOptions(
            not continues if begins_message is None else begins_message,
            continues,
            request.chat_template_kwargs or {},
        )
    except ValueError as error:
        raise invalid(str(error), "add_generation_prompt") from None


def _requested_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _tools(service: Service, request: ChatRequest) -> RequestedTools:
    choice = request.tool_choice
    tools = resolve_tools(
        service,
        [tool.function for tool in request.tools or ()],
        choice.function if isinstance(choice, NamedTool) else choice,
        single_call=request.parallel_tool_calls is False,
    )
    if not _is_text(request):
        tools.check_text_format("response_format")
    return tools


def _is_text(request: ChatRequest) -> bool:
    return not isinstance(request.response_format, JsonFormat | SchemaFormat)


async def _constraint(
    service: Service, request: ChatRequest, tools: RequestedTools
) -> GrammarConstraint | None:
    """Return the grammar that the output must match, or None if any text is allowed."""
    response_format = request.response_format
    structured = request.structured_outputs is not None
    if structured and (tools.call_format is not None or not _is_text(request)):
        raise invalid(
            "structured_outputs cannot be combined with response_format or tools",
            "structured_outputs",
        )
    if tools.required or not _is_text(request):
        check_free_length(request, "response_format or a required tool call")
    if tools.single_call:
        check_free_length(request, "parallel_tool_calls=false")
    if tools.required:
        return await tools.grammar(service)
    if request.structured_outputs is not None:
        return await structured_grammar(service, request, request.structured_outputs)
    if isinstance(response_format, SchemaFormat):
        schema = response_format.json_schema.schema
        return await service.grammars.from_schema(schema, "response_format")
    if isinstance(response_format, JsonFormat):
        return await service.grammars.from_schema({"type": "object"}, "response_format")
    return None


def _contents(messages: Sequence[ChatMessage]) -> Iterator[object]:
    """Yield the contents and the lists of tool calls of messages, for ``check_contents``."""
    for message in messages:
        yield message.content
        if message.tool_calls:
            yield message.tool_calls


def _template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as dicts for the chat template.

    Contents are plain text, the arguments of tool calls are objects instead of JSON text, and the
    role ``developer`` becomes ``system``. The result of a call has the function's name, as in the
    other APIs, unless the client gave it another. Raises ``ApiError`` if a message has no content,
    ``tool_calls`` is set in a message that is not the assistant's, ``tool_call_id`` is set in a
    message that is not a tool's, or the arguments of a call are not a JSON object.
    """
    plain_messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by the id of the call
    for index, message in enumerate(messages):
        plain = _template_message(message, f"messages[{index}]")
        for call in plain.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if plain.get("tool_call_id") in names:
            plain.setdefault("name", names[plain["tool_call_id"]])
        plain_messages.append(plain)
    return plain_messages


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """Return a message as a dict. ``path`` names it in error messages."""
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls: only an assistant message may have it", "messages")
    if message.tool_call_id and message.role != "tool":
        raise invalid(f"{path}.tool_call_id: only a tool message may have it", "messages")
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None:
        if message.role != "assistant":
            raise invalid(f"{path}: a message with role={message.role} needs content", "messages")
        content = message.refusal or ""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            template_call(
                call.id,
                call.function.name,
                decode_arguments(call.function.name, call.function.arguments, "messages"),
            )
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain
