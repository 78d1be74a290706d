"""The responses of ``/v1/chat/completions``: a single JSON body, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs
from labkit.server.apis.generated_choice import (
    ChoicesWriter,
    GeneratedChoice,
    prompt_logprob_objects,
    token_logprob,
)
from labkit.server.apis.requested_tools import RequestedTools
from labkit.server.constraints.tool_call_parser import ParsedToolCall, ToolCallParser
from labkit.server.generation.api_generation import (
    Generation,
    Part,
    TokenOutput,
    message_parts,
    output_parts,
)
from labkit.server.generation.http_response import sse_event
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
    ToolCall,
    ToolCallDelta,
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
        message = Message("assistant", None if calls and not text else text, None, calls or UNSET)
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
