"""``/v1/responses``: OpenAI's Responses API for text and function calls.

The server does not store responses, so every request must contain the entire conversation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from labkit.server.apis.conversation_generation import converse
from labkit.server.apis.request_checks import check_model
from labkit.server.apis.requested_tools import RequestedTools, resolve_tools
from labkit.server.apis.responses_writer import ResponseWriter
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.http_response import GenerationResponse
from labkit.server.generation.prompt_encoding import check_contents
from labkit.server.generation.service import Service
from labkit.server.generation.template_messages import TemplateMessages, decode_arguments
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import FunctionName, Sampling
from labkit.server.types.request_decoder import decode
from labkit.server.types.responses_types import (
    FunctionChoice,
    InputCall,
    InputCallOutput,
    InputMessage,
    ResponseJsonFormat,
    ResponseSchemaFormat,
    ResponsesRequest,
)

_decoder = msgspec.json.Decoder(ResponsesRequest)


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises ``ApiError`` if the request cannot be served.
    """
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
    timeout_s, generation = service.options.timeout_s, conversation.generation
    if request.stream:
        return GenerationResponse(
            generation, timeout_s, events=writer.events(), encode_error=writer.encode_error_event
        )
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


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
