"""A choice of a response: its tokens, text and log probabilities, as the APIs return them.

The log probabilities of a prompt are vLLM's ``prompt_logprobs``, and those of ``echo``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer
from labkit.models.tokenizer import Tokenizer
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.http_response import DONE, stream_error_event
from labkit.server.generation.service import Service
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.openai_types import (
    PromptLogprob,
    PromptLogprobObjects,
    PromptTokensDetails,
    Sampling,
    StreamOptions,
    TokenLogprob,
    TopLogprob,
    Usage,
)

MIN_LOGPROB = -9999.0  # JSON has no infinity
MAX_LOGPROBS_ON_LOOP = 1000  # of a body that is built on the event loop, in about 3 ms
MAX_LOGPROBS_PER_RESPONSE = 1 << 18  # in a body of about 20 MB
_encode = msgspec.json.Encoder().encode


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


def token_logprob(service: Service, token: int, logprobs: Logprobs) -> TokenLogprob:
    """Return the chat API's logprob object for a token and its most likely alternatives."""
    own = _top_logprob(service, token, logprobs.token)
    top = [_top_logprob(service, *pair) for pair in logprobs.top]
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(service: Service, token: int, logprob: float) -> TopLogprob:
    text = service.token_text(token)
    utf8 = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return TopLogprob(text, clamp_logprob(logprob), utf8)


def clamp_logprob(logprob: float) -> float:
    """Return the logprob, but at least ``MIN_LOGPROB``: JSON cannot represent -inf."""
    return max(logprob, MIN_LOGPROB)


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], n: int, top: int | None) -> None:
    """Check the number of log probabilities of prompt tokens in a response of ``n`` choices.

    ``top`` is the number of likeliest tokens per position, or None if the request asks for no log
    probabilities. Raises ``ApiError`` if there are more than ``MAX_LOGPROBS_PER_RESPONSE``.
    """
    count = 0 if top is None else sum(map(len, prompts)) * n * (1 + top)
    if count > MAX_LOGPROBS_PER_RESPONSE:
        raise invalid(
            f"the response would have {count} log probabilities of prompt tokens; the limit is "
            f"{MAX_LOGPROBS_PER_RESPONSE}",
            "prompt",
        )


def prompt_logprobs_by_token(
    logprobs: PromptLogprobs | None, prompt: Sequence[int], top: int
) -> list[Logprobs | None]:
    """Return the log probabilities of each prompt token and of the ``top`` likeliest tokens.

    The first token has none. ``logprobs`` is the engine's result, None for a prompt of one token.
    Raises ``ApiError`` if the engine returned no log probabilities.
    """
    if logprobs is None:
        if len(prompt) > 1:
            raise ApiError(500, "the engine returned no log probabilities of the prompt")
        return [None]
    ids, values = logprobs.top_ids[:, :top].tolist(), logprobs.top[:, :top].tolist()
    rows = zip(logprobs.tokens.tolist(), ids, values, strict=True)
    return [None, *(Logprobs(own, tuple(zip(*pairs, strict=True))) for own, *pairs in rows)]


def prompt_logprob_objects(
    service: Service, prompt: Sequence[int], logprobs: PromptLogprobs | None, top: int | None
) -> PromptLogprobObjects | UnsetType:
    """Return vLLM's ``prompt_logprobs``, or UNSET if the request asks for none (``top`` is None).

    The other parameters are those of ``prompt_logprobs_by_token``. Each position is encoded to JSON
    by itself, because encoding all positions in one call would hold the GIL and block the event
    loop for 0.3 s.
    """
    if top is None:
        return UNSET
    by_token = prompt_logprobs_by_token(logprobs, prompt, top)
    encoded = [
        None if item is None else msgspec.Raw(_encode(_position(service, token, item)))
        for token, item in zip(prompt, by_token, strict=True)
    ]
    return cast(PromptLogprobObjects, encoded)


def _position(service: Service, token: int, item: Logprobs) -> dict[int, PromptLogprob]:
    ranked = {
        other: PromptLogprob(clamp_logprob(value), rank, service.token_text(other))
        for rank, (other, value) in enumerate(item.top, 1)
    }
    own = PromptLogprob(clamp_logprob(item.token), None, service.token_text(token))
    return {token: ranked.get(token, own)} | ranked


def token_offsets(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> list[int]:
    """Return where each token of a prompt begins in the prompt's text (characters).

    Tokens that the tokenizer added before the text, such as a BOS token, begin at 0.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokens]
    num_added = max(0, ("".join(pieces) + detokenizer.finish()).find(text))
    offsets = itertools.accumulate(map(len, pieces[:-1]), initial=-num_added)
    return [min(max(0, offset), len(text)) for offset in offsets]
