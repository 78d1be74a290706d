"""A choice of a response as it is generated, and the writer of choices in the form of an API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.server.apis.response_logprobs import MAX_LOGPROBS_PER_RESPONSE
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.http_response import DONE, stream_error_event
from labkit.server.generation.service import Service
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import PromptTokensDetails, Sampling, StreamOptions, Usage

MAX_LOGPROBS_ON_LOOP = 1000  # of a body that is built on the event loop, in about 3 ms


@dataclass(slots=True)
class GeneratedChoice:
    """The tokens, text and logprobs that a choice has generated so far."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, output: TokenOutput) -> None:
        """Add the choice's next output."""
        if output.token is not None:
            self.tokens.append(output.token)
        if output.text:
            self.texts.append(output.text)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.stop = output.finish_reason, output.stop


async def collect(generation: Generation, count: int) -> list[GeneratedChoice]:
    """Wait until all ``count`` choices have ended and return them.

    Raises ``ApiError`` if they have more than ``MAX_LOGPROBS_PER_RESPONSE`` log probabilities.
    """
    choices, num_logprobs = [GeneratedChoice() for _ in range(count)], 0
    async for outputs in generation.outputs():
        for output in outputs:
            choices[output.index].add(output)
            num_logprobs += 0 if output.logprobs is None else 1 + len(output.logprobs.top)
        if num_logprobs > MAX_LOGPROBS_PER_RESPONSE:
            raise invalid(
                f"the response has more than {MAX_LOGPROBS_PER_RESPONSE} log probabilities; set "
                "max_tokens lower, or stream=true",
                "logprobs",
            )
    return choices


async def build_body(
    service: Service,
    write: Callable[[Sequence[GeneratedChoice]], bytes],
    choices: Sequence[GeneratedChoice],
) -> bytes:
    """Return the body of all choices, built in a thread if it has many log probabilities."""
    count = sum(1 + len(item.top) for choice in choices for item in choice.logprobs)
    has_prompt = any(choice.prompt_logprobs is not None for choice in choices)
    if has_prompt or count > MAX_LOGPROBS_ON_LOOP:
        return await service.run_in_thread(write, choices, long=True)
    return write(choices)


class ChoicesWriter(ABC):
    """Writes the choices of a generation as a single JSON body, or as the chunks of a stream.

    A subclass has the objects of one API. Each of ``prompts`` has ``n`` choices.
    """

    def __init__(
        self,
        service: Service,
        request: Sampling,
        call_id: str,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        n: int,
    ) -> None:
        self._service = service
        self._stream_options = request.stream_options or StreamOptions()
        self._with_token_ids = bool(request.return_token_ids)
        self._id = call_id
        self._generation = generation
        self._prompts = prompts
        self._n = n

    encode_error = staticmethod(stream_error_event)

    async def full_body(self) -> bytes:
        generated = await collect(self._generation, len(self._prompts) * self._n)
        return await build_body(self._service, self._body, generated)

    async def events(self) -> AsyncIterator[bytes]:
        with_usage = bool(self._stream_options.include_usage)
        continuous_usage = with_usage and bool(self._stream_options.continuous_usage_stats)
        num_tokens = 0
        async for outputs in self._generation.outputs():
            parts: list[bytes] = []
            for output in outputs:
                num_tokens += output.token is not None
                current: Any = None if with_usage else UNSET
                if continuous_usage:
                    current = self._usage(num_tokens)
                parts += await self._chunks(output, current)
            if parts:
                yield b"".join(parts)
        yield (self._chunk([], self._usage(num_tokens)) if with_usage else b"") + DONE

    def _usage(self, num_tokens: int) -> Usage:
        prompt_tokens = sum(map(len, self._prompts))
        return usage(prompt_tokens, num_tokens, self._generation.num_cached_tokens(self._n))

    @abstractmethod
    def _body(self, generated: Sequence[GeneratedChoice]) -> bytes:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    async def _chunks(self, output: TokenOutput, current: Any) -> list[bytes]:
        """Return the chunks of one output. ``current`` is the usage that they report, if any."""

    @abstractmethod
    def _chunk(self, choices: list[Any], current: Any) -> bytes:
        """Return a chunk with parts of choices."""


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Return the usage object. ``cached_tokens`` of the prompts were in the prefix cache."""
    total, details = prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, total, details)
