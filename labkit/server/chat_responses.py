"""A conversation's answer as the API's objects: in one piece, or as a stream's chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs
from labkit.server.api_generation import Generation, TokenOutput
from labkit.server.openai_types import (
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
    Usage,
)
from labkit.server.response_streams import DONE, event
from labkit.server.sampling_translation import GeneratedChoice, collect, token_logprob, usage
from labkit.server.serving_service import Service
from labkit.server.tool_calls import ParsedToolCall, ToolCallFormat, ToolCallParser

_encode = msgspec.json.Encoder().encode


class DeltaWriter:
    """One choice of a stream: what of it has been said."""

    def __init__(self, reader: ToolCallParser | None) -> None:
        self._reader = reader
        self._begun = False
        self._calls = 0

    def deltas(self, piece: TokenOutput) -> list[Delta]:
        """Return what a piece adds, the role with the first of all."""
        said: list[str | ParsedToolCall] = [piece.text] if piece.text else []
        if self._reader is not None:
            said = list(self._reader.add(piece.text))
            said += self._reader.finish() if piece.finish_reason else ()
        return [delta for item in said for delta in self._delta(item)]

    def empty(self) -> Delta:
        """Return what a chunk without text says: nothing, or at the beginning the role."""
        return Delta() if self._begun else Delta(self._role(), "")

    def finish_reason(self, piece: TokenOutput) -> Any:
        """Return how the choice ends with the piece, if it does."""
        return (
            "tool_calls" if self._calls and piece.finish_reason == "stop" else piece.finish_reason
        )

    def _role(self) -> Any:
        role, self._begun = UNSET if self._begun else "assistant", True
        return role

    def _delta(self, item: str | ParsedToolCall) -> Iterator[Delta]:
        if isinstance(item, str):
            yield Delta(self._role(), item)
            return
        at, self._calls = self._calls, self._calls + 1
        named = FunctionDelta("", item.name)
        yield Delta(self._role(), UNSET, [ToolCallDelta(at, named, item.id, "function")])
        yield Delta(UNSET, UNSET, [ToolCallDelta(at, FunctionDelta(item.arguments))])


class ChatWriter:
    """Writes a generation as the API's objects.

    ``tool_format`` and ``tools``: how calls are written, and what may be called; None: nothing.
    """

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        call_id: str,
        generation: Generation,
        prompt: Sequence[int],
        n: int,
        tool_format: ToolCallFormat | None,
        tools: Sequence[dict[str, Any]],
    ) -> None:
        self._service = service
        self._request = request
        self._id = call_id
        self._generation = generation
        self._prompt = prompt
        self._n = n
        self._form = tool_format
        self._tools = tools
        self._ids = bool(request.return_token_ids)

    def _reader(self) -> ToolCallParser | None:
        return None if self._form is None else ToolCallParser(self._form, self._tools)

    async def full_body(self) -> bytes:
        """Return the answer in one piece."""
        found = await collect(self._generation, self._n)
        choices = [self._choice(index, generated) for index, generated in enumerate(found)]
        return _encode(
            ChatCompletion(
                self._id,
                "chat.completion",
                self._generation.created,
                self._service.name,
                choices,
                self._usage(sum(len(choice.tokens) for choice in found)),
                list(self._prompt) if self._ids else UNSET,
            )
        )

    def _choice(self, index: int, generated: GeneratedChoice) -> ChatChoice:
        reader, calls, text = self._reader(), [], generated.text
        if reader is not None:
            said = [*reader.add(text), *reader.finish()]
            calls = [item for item in said if isinstance(item, ParsedToolCall)]
            text = "".join(item for item in said if isinstance(item, str))
        made = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in calls]
        message = Message("assistant", None if made and not text else text, None, made or UNSET)
        return ChatChoice(
            index,
            message,
            "tool_calls"
            if made and generated.finish_reason == "stop"
            else cast(Any, generated.finish_reason),
            self._logprobs(generated.tokens, generated.logprobs),
            generated.tokens if self._ids else UNSET,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, each step's together."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        running = bool(options and options.continuous_usage_stats)
        speakers = [DeltaWriter(self._reader()) for _ in range(self._n)]
        generated, first = 0, True
        async for pieces in self._generation.pieces():
            parts = []
            for piece in pieces:
                generated += piece.token is not None
                now: Any = self._usage(generated) if running else None if with_usage else UNSET
                for choice in self._chunk_choices(piece, speakers[piece.index]):
                    parts.append(self._chunk([choice], now, first=first))
                    first = False
            if parts:
                yield b"".join(parts)
        yield (self._chunk([], self._usage(generated)) if with_usage else b"") + DONE

    def _chunk_choices(self, piece: TokenOutput, speaker: DeltaWriter) -> list[ChunkChoice]:
        """Return what a piece adds to the stream: none, where it has nothing to say yet."""
        deltas = speaker.deltas(piece)
        if not deltas and (self._ids or piece.logprobs or piece.finish_reason):
            deltas = [speaker.empty()]
        tokens = [] if piece.token is None else [piece.token]
        logprobs = self._logprobs(tokens, [piece.logprobs] if piece.logprobs else [])
        choices, last = [], len(deltas) - 1
        for at, delta in enumerate(deltas):
            ids: Any = (tokens if at == 0 else []) if self._ids else UNSET
            reason = speaker.finish_reason(piece) if at == last else None
            told = logprobs if at == 0 else None
            choices.append(ChunkChoice(piece.index, delta, reason, told, ids))
        return choices

    def _chunk(self, choices: list[ChunkChoice], used: Any, *, first: bool = False) -> bytes:
        return event(
            _encode(
                ChatChunk(
                    self._id,
                    "chat.completion.chunk",
                    self._generation.created,
                    self._service.name,
                    choices,
                    used,
                    list(self._prompt) if first and self._ids else UNSET,
                )
            )
        )

    def _usage(self, generated: int) -> Usage:
        return usage(len(self._prompt), generated)

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Logprobs]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        pairs = zip(tokens, found, strict=True)
        return ChatLogprobs([token_logprob(self._service, token, one) for token, one in pairs])
