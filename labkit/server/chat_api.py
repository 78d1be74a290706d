"""``/v1/chat/completions``: a conversation, continued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.base import Logprobs
from labkit.server.api_error import invalid
from labkit.server.event_stream import DONE, Answer, event
from labkit.server.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    Message,
    Usage,
)
from labkit.server.sampled_text import (
    Written,
    check_choices,
    check_model,
    check_stream,
    collect,
    decode,
    encode_conversation,
    output_tokens,
    to_params,
    token_logprob,
    usage,
)
from labkit.server.service import Generation, Service, new_id

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


async def answer(service: Service, body: bytes) -> Answer:
    """Begin what a body asks for.

    Raises
    ------
    ApiError
        It cannot be served.
    """
    asked = decode(_decoder, body)
    check_model(service, asked.model)
    check_stream(asked)
    n = check_choices(service, asked.n)
    prompt = await encode_conversation(service, plain(asked.messages))
    limit = _limit(asked)
    most = service.options.max_output_tokens
    max_tokens = output_tokens(service, prompt, limit, default=most, param="messages")
    params = to_params(service, asked, max_tokens=max_tokens, logprobs=_logprobs(asked))
    call_id = new_id("chatcmpl")
    generation = service.generate(call_id, [prompt], params, n)
    writer = ChatWriter(service, asked, call_id, generation, prompt, n)
    timeout_s = service.options.timeout_s
    if asked.stream:
        return Answer(generation, timeout_s, events=writer.events())
    return Answer(generation, timeout_s, whole=writer.whole)


def _limit(asked: ChatRequest) -> int | None:
    both = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(both) > 1:
        raise invalid("max_tokens and max_completion_tokens are one option; give one", "max_tokens")
    return both.pop() if both else None


def _logprobs(asked: ChatRequest) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs: only with logprobs=true", "top_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: contents are texts."""
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
    return {"role": role, "content": content}


class ChatWriter:
    """Writes a generation as the API's objects."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        call_id: str,
        generation: Generation,
        prompt: Sequence[int],
        n: int,
    ) -> None:
        self._service = service
        self._asked = asked
        self._id = call_id
        self._generation = generation
        self._prompt = prompt
        self._n = n
        self._ids = bool(asked.return_token_ids)

    async def whole(self) -> bytes:
        """Return the answer in one piece."""
        found = await collect(self._generation, self._n)
        choices = [self._choice(index, written) for index, written in enumerate(found)]
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

    def _choice(self, index: int, written: Written) -> ChatChoice:
        return ChatChoice(
            index,
            Message("assistant", written.text),
            cast(Any, written.finish_reason),
            self._logprobs(written.tokens, written.logprobs),
            written.tokens if self._ids else UNSET,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, each step's together."""
        options = self._asked.stream_options
        with_usage = bool(options and options.include_usage)
        running = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        written = 0
        async for pieces in self._generation.pieces():
            parts = []
            for piece in pieces:
                written += piece.token is not None
                if not (piece.text or self._ids or piece.logprobs or piece.finish_reason):
                    continue
                tokens = [] if piece.token is None else [piece.token]
                choice = ChunkChoice(
                    piece.index,
                    Delta(
                        UNSET if piece.index in begun else "assistant",
                        piece.text if piece.text or piece.index not in begun else UNSET,
                    ),
                    piece.finish_reason,
                    self._logprobs(tokens, [piece.logprobs] if piece.logprobs else []),
                    tokens if self._ids else UNSET,
                )
                now: Any = self._usage(written) if running else None if with_usage else UNSET
                parts.append(self._chunk([choice], now, first=not begun))
                begun.add(piece.index)
            if parts:
                yield b"".join(parts)
        yield (self._chunk([], self._usage(written)) if with_usage else b"") + DONE

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

    def _usage(self, written: int) -> Usage:
        return usage(len(self._prompt), written)

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Logprobs]) -> ChatLogprobs | None:
        if not self._asked.logprobs:
            return None
        tokenizer = self._service.tokenizer
        pairs = zip(tokens, found, strict=True)
        return ChatLogprobs([token_logprob(tokenizer, token, one) for token, one in pairs])
