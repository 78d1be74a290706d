"""The next message of a conversation, as the messages and responses APIs generate and send it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from labkit.models.chat_template import RenderOptions
from labkit.server.apis.generated_choice import GeneratedChoice, collect
from labkit.server.apis.request_checks import to_params
from labkit.server.apis.requested_tools import RequestedTools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import ParsedToolCall
from labkit.server.generation.api_generation import Generation, Part, message_parts, output_parts
from labkit.server.generation.prompt_encoding import encode_conversation, resolve_max_tokens
from labkit.server.generation.service import Service, new_id
from labkit.server.types.api_error import ApiError
from labkit.server.types.openai_types import Sampling


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and the generation of its next message."""

    id: str
    prompt: list[int]
    tools: RequestedTools
    generation: Generation


async def converse(
    service: Service,
    kind: str,
    messages: list[dict[str, Any]],
    tools: RequestedTools,
    sampling: Sampling,
    *,
    limit: int | None,
    param: str,
    compile_grammar: Callable[[], Awaitable[GrammarConstraint | None]],
    options: RenderOptions | None = None,
) -> Conversation:
    """Start generating the next message of a conversation.

    ``kind`` is the prefix of the response's id, ``limit`` the maximum number of tokens that the
    client requested, and ``param`` the request's field that contains the messages.
    ``compile_grammar`` is called when the prompt has been accepted. It returns the grammar that
    the message must match, or None if that of ``tools`` applies. Raises ``ApiError`` if the request
    cannot be served.
    """
    prompt = await encode_conversation(
        service, messages, tools.definitions, param=param, options=options
    )
    max_tokens = resolve_max_tokens(service, prompt, limit, param=param)
    params = to_params(service, sampling, max_tokens=max_tokens, logprobs=None)
    constraint = await compile_grammar() or await tools.grammar(service)
    call_id = new_id(kind)
    generation = service.generate(
        call_id, [prompt], params, 1, constraint, tools.single_call_parser
    )
    return Conversation(call_id, prompt, tools, generation)


class ConversationWriter(ABC):
    """Writes the model's reply as a single JSON body, or as a stream of events for its parts.

    A subclass has the events of one API, in which ``index`` counts the parts.
    """

    def __init__(self, model: str, conversation: Conversation) -> None:
        self._model = model
        self._conversation = conversation
        self._parts: list[Part] = []  # those that have ended
        self._text: list[str] | None = None  # the pieces of the text that has not ended

    async def full_body(self) -> bytes:
        (generated,) = await collect(self._conversation.generation, 1)
        parts = message_parts(generated.text, self._conversation.tools.parser())
        return msgspec.json.encode(self._reply(generated, parts))

    async def events(self) -> AsyncIterator[bytes]:
        generated, parser = GeneratedChoice(), self._conversation.tools.parser()
        started = False
        async for outputs in self._conversation.generation.outputs():
            events = [] if started else self._start()
            started = True
            for output in outputs:
                generated.add(output)
                for part in output_parts(output, parser):
                    events += self._add(part)
            if events:
                yield b"".join(events)
        events = [] if self._parts or self._text is not None else self._start_text()
        events += self._end_text(is_whole=generated.finish_reason != "length")
        yield b"".join(events + self._end(generated, self._parts))

    def _add(self, part: Part) -> list[bytes]:
        if isinstance(part, str):
            events = self._start_text() if self._text is None else []
            assert self._text is not None
            self._text.append(part)
            return events + self._text_delta(len(self._parts), part)
        events = self._end_text(is_whole=True)
        events += self._call(len(self._parts), part)
        self._parts.append(part)
        return events

    def _start_text(self) -> list[bytes]:
        self._text = []
        return self._text_start(len(self._parts))

    def _end_text(self, *, is_whole: bool) -> list[bytes]:
        if self._text is None:
            return []
        text, index, self._text = "".join(self._text), len(self._parts), None
        self._parts.append(text)
        return self._text_end(index, text, is_whole=is_whole)

    @abstractmethod
    def _reply(self, generated: GeneratedChoice, parts: Sequence[Part]) -> msgspec.Struct:
        """Return the body of a reply that is not streamed."""

    @abstractmethod
    def _start(self) -> list[bytes]: ...

    @abstractmethod
    def _text_start(self, index: int) -> list[bytes]: ...

    @abstractmethod
    def _text_delta(self, index: int, text: str) -> list[bytes]: ...

    @abstractmethod
    def _text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        """``is_whole`` is False if the maximum output length cut the text off."""

    @abstractmethod
    def _call(self, index: int, call: ParsedToolCall) -> list[bytes]: ...

    @abstractmethod
    def _end(self, generated: GeneratedChoice, parts: Sequence[Part]) -> list[bytes]: ...

    @abstractmethod
    def encode_error(self, error: ApiError) -> bytes: ...
