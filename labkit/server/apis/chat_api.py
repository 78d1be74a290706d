"""``/v1/chat/completions``: generates the next message of a conversation.

A response is a single JSON body, or the chunks of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs
from labkit.models.chat_template import Message, RenderOptions
from labkit.server.apis.generated_choice import ChoicesWriter, GeneratedChoice
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
from labkit.server.apis.response_logprobs import (
    check_prompt_logprobs,
    prompt_logprob_objects,
    token_logprob,
)
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import ParsedToolCall, ToolCallParser
from labkit.server.generation.api_generation import (
    Generation,
    Part,
    TokenOutput,
    message_parts,
    output_parts,
)
from labkit.server.generation.http_response import GenerationResponse, sse_event
from labkit.server.generation.prompt_encoding import (
    check_contents,
    encode_conversation,
    resolve_max_tokens,
)
from labkit.server.generation.service import Service, new_id
from labkit.server.generation.template_messages import decode_arguments, template_call
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    JsonFormat,
    NamedTool,
    SchemaFormat,
    ToolCall,
    ToolCallDelta,
)
from labkit.server.types.openai_types import Message as ReplyMessage
from labkit.server.types.request_decoder import decode

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


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


class DeltaWriter:
    """Turns the outputs of one choice into a stream's deltas."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser
        self._role_sent = False
        self._num_calls = 0

    def deltas(self, output: TokenOutput) -> list[Delta]:
        """Return an output's deltas. Only the choice's first delta contains the role."""
        parts = output_parts(output, self._parser)
        return [delta for part in parts for delta in self._part_deltas(part)]

    def empty(self) -> Delta:
        """Return a delta without text. It contains the role if it is the choice's first."""
        return Delta() if self._role_sent else Delta(self._role(), "")

    def finish_reason(self, output: TokenOutput) -> Any:
        """Return the choice's finish reason, or None if the output is not the choice's last."""
        return _finish_reason(output.finish_reason, self._num_calls > 0)

    def _role(self) -> Any:
        role, self._role_sent = UNSET if self._role_sent else "assistant", True
        return role

    def _part_deltas(self, part: Part) -> Iterator[Delta]:
        if isinstance(part, str):
            yield Delta(self._role(), part)
            return
        index, self._num_calls = self._num_calls, self._num_calls + 1
        name, call_id = FunctionDelta("", part.name), part.prefixed_id("call")
        yield Delta(self._role(), UNSET, [ToolCallDelta(index, name, call_id, "function")])
        yield Delta(UNSET, UNSET, [ToolCallDelta(index, FunctionDelta(part.arguments))])


class ChatWriter(ChoicesWriter):
    """Writes a generation as a response of the chat API."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        call_id: str,
        generation: Generation,
        prompt: Sequence[int],
        n: int,
        tools: RequestedTools,
    ) -> None:
        super().__init__(service, request, call_id, generation, [prompt], n)
        self._request = request
        self._prompt = prompt
        self._tools = tools
        self._writers = [DeltaWriter(tools.parser()) for _ in range(n)]
        self._is_first = True  # whether the next chunk is the stream's first

    def _body(self, generated: Sequence[GeneratedChoice]) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(generated)]
        return _encode(
            ChatCompletion(
                self._id,
                "chat.completion",
                self._generation.created,
                self._service.name,
                choices,
                self._usage(sum(len(choice.tokens) for choice in generated)),
                list(self._prompt) if self._with_token_ids else UNSET,
                prompt_logprob_objects(
                    self._service,
                    self._prompt,
                    generated[0].prompt_logprobs,
                    self._request.prompt_logprobs,
                ),
            )
        )

    def _choice(self, index: int, generated: GeneratedChoice) -> ChatChoice:
        parts = message_parts(generated.text, self._tools.parser())
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [
            ToolCall(part.prefixed_id("call"), FunctionCall(part.name, part.arguments))
            for part in parts
            if isinstance(part, ParsedToolCall)
        ]
        message = ReplyMessage(
            "assistant", None if calls and not text else text, None, calls or UNSET
        )
        return ChatChoice(
            index,
            message,
            _finish_reason(generated.finish_reason, bool(calls)),
            self._logprobs(generated.tokens, generated.logprobs),
            generated.tokens if self._with_token_ids else UNSET,
        )

    async def _chunks(self, output: TokenOutput, current: Any) -> list[bytes]:
        writer = self._writers[output.index]
        deltas = writer.deltas(output)
        if not deltas and (self._with_token_ids or output.logprobs or output.finish_reason):
            deltas = [writer.empty()]
        tokens = [] if output.token is None else [output.token]
        logprobs = self._logprobs(tokens, [output.logprobs] if output.logprobs else [])
        chunks, last = [], len(deltas) - 1
        for at, delta in enumerate(deltas):
            ids: Any = (tokens if at == 0 else []) if self._with_token_ids else UNSET
            reason = writer.finish_reason(output) if at == last else None
            first_logprobs = logprobs if at == 0 else None
            choice = ChunkChoice(output.index, delta, reason, first_logprobs, ids)
            chunks.append(self._chunk([choice], current))
        return chunks

    def _chunk(self, choices: list[ChunkChoice], current: Any) -> bytes:
        is_first, self._is_first = self._is_first, False
        return sse_event(
            _encode(
                ChatChunk(
                    self._id,
                    "chat.completion.chunk",
                    self._generation.created,
                    self._service.name,
                    choices,
                    current,
                    list(self._prompt) if is_first and self._with_token_ids else UNSET,
                )
            )
        )

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> ChatLogprobs | None:
        """Return log probabilities, each encoded by itself: many in one call would hold the GIL."""
        if not self._request.logprobs:
            return None
        items = (token_logprob(self._service, *pair) for pair in zip(tokens, logprobs, strict=True))
        return ChatLogprobs(cast(Any, [msgspec.Raw(_encode(item)) for item in items]))


def _finish_reason(reason: str | None, has_calls: bool) -> Any:
    """Return the reason, which is ``tool_calls`` if a choice called tools and stopped."""
    return "tool_calls" if has_calls and reason == "stop" else reason
