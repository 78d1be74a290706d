"""The responses of ``/v1/chat/completions``: a single JSON body, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from labkit.engine.engine_protocol import Logprobs
from labkit.server.apis import prompt_logprobs_format
from labkit.server.apis.generated_choice import (
    GeneratedChoice,
    build_body,
    collect,
    token_logprob,
    usage,
)
from labkit.server.apis.requested_tools import RequestedTools
from labkit.server.constraints.tool_call_parser import ParsedToolCall, ToolCallParser
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.http_response import DONE, sse_event
from labkit.server.generation.output_parts import Part, message_parts, output_parts
from labkit.server.generation.service import Service
from labkit.server.types.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    Message,
    PromptLogprobObjects,
    ToolCall,
    ToolCallDelta,
    Usage,
)

_encode = msgspec.json.Encoder().encode


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
        """Return the choice's finish reason, or None if the output is not the choice's last.

        A choice that called tools and stopped has the reason ``tool_calls``.
        """
        return (
            "tool_calls"
            if self._num_calls and output.finish_reason == "stop"
            else output.finish_reason
        )

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


class ChatWriter:
    """Writes a generation as a response of the chat API.

    ``n`` is the number of choices.
    """

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
        self._service = service
        self._request = request
        self._id = call_id
        self._generation = generation
        self._prompt = prompt
        self._n = n
        self._tools = tools
        self._with_token_ids = bool(request.return_token_ids)

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        generated = await collect(self._generation, self._n)
        return await build_body(self._service, self._body, generated)

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
                self._prompt_logprobs(generated[0]),
            )
        )

    def _prompt_logprobs(self, generated: GeneratedChoice) -> PromptLogprobObjects | UnsetType:
        return prompt_logprobs_format.to_objects(
            self._service, self._prompt, generated.prompt_logprobs, self._request.prompt_logprobs
        )

    def _choice(self, index: int, generated: GeneratedChoice) -> ChatChoice:
        parts = message_parts(generated.text, self._tools.parser())
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [
            ToolCall(part.prefixed_id("call"), FunctionCall(part.name, part.arguments))
            for part in parts
            if isinstance(part, ParsedToolCall)
        ]
        message = Message("assistant", None if calls and not text else text, None, calls or UNSET)
        return ChatChoice(
            index,
            message,
            "tool_calls"
            if calls and generated.finish_reason == "stop"
            else cast(Any, generated.finish_reason),
            self._logprobs(generated.tokens, generated.logprobs),
            generated.tokens if self._with_token_ids else UNSET,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        continuous_usage = with_usage and bool(options and options.continuous_usage_stats)
        writers = [DeltaWriter(self._tools.parser()) for _ in range(self._n)]
        num_tokens, first = 0, True
        async for outputs in self._generation.outputs():
            parts = []
            for output in outputs:
                num_tokens += output.token is not None
                current: Any = None if with_usage else UNSET
                if continuous_usage:
                    current = self._usage(num_tokens)
                for choice in self._chunk_choices(output, writers[output.index]):
                    parts.append(self._chunk([choice], current, first=first))
                    first = False
            if parts:
                yield b"".join(parts)
        yield (self._chunk([], self._usage(num_tokens)) if with_usage else b"") + DONE

    def _chunk_choices(self, output: TokenOutput, writer: DeltaWriter) -> list[ChunkChoice]:
        """Return an output's entries in the stream, or [] if there is nothing to send yet."""
        deltas = writer.deltas(output)
        if not deltas and (self._with_token_ids or output.logprobs or output.finish_reason):
            deltas = [writer.empty()]
        tokens = [] if output.token is None else [output.token]
        logprobs = self._logprobs(tokens, [output.logprobs] if output.logprobs else [])
        choices, last = [], len(deltas) - 1
        for at, delta in enumerate(deltas):
            ids: Any = (tokens if at == 0 else []) if self._with_token_ids else UNSET
            reason = writer.finish_reason(output) if at == last else None
            first_logprobs = logprobs if at == 0 else None
            choices.append(ChunkChoice(output.index, delta, reason, first_logprobs, ids))
        return choices

    def _chunk(self, choices: list[ChunkChoice], current: Any, *, first: bool = False) -> bytes:
        return sse_event(
            _encode(
                ChatChunk(
                    self._id,
                    "chat.completion.chunk",
                    self._generation.created,
                    self._service.name,
                    choices,
                    current,
                    list(self._prompt) if first and self._with_token_ids else UNSET,
                )
            )
        )

    def _usage(self, num_tokens: int) -> Usage:
        return usage(len(self._prompt), num_tokens, self._generation.num_cached_tokens(self._n))

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> ChatLogprobs | None:
        """Return the log probabilities of tokens, if the request asks for them.

        Each is encoded by itself: encoding many in one call would hold the GIL and so the event
        loop.
        """
        if not self._request.logprobs:
            return None
        items = (token_logprob(self._service, *pair) for pair in zip(tokens, logprobs, strict=True))
        return ChatLogprobs(cast(Any, [msgspec.Raw(_encode(item)) for item in items]))
