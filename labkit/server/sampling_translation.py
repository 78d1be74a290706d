"""From what clients ask to the engine's parameters, and from tokens to what clients are told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from labkit.config import ConfigError
from labkit.engine.engine_protocol import Logprobs
from labkit.engine.request import SamplingParams
from labkit.server.api_error import ApiError, invalid
from labkit.server.api_generation import Generation, Piece
from labkit.server.openai_types import Sampling, TokenLogprob, TopLogprob, Usage
from labkit.server.serving_service import Service, new_id
from labkit.server.structured_output import GrammarConstraint

T = TypeVar("T")
LEAST_LOGPROB = -9999.0  # JSON has no infinity
TOO_LONG = "context_length_exceeded"


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Read a request's body.

    Raises
    ------
    ApiError
        It is not JSON, or not what the decoder expects; ``param`` names the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = re.search(r"contains unknown field `(.*?)`", text)
        if unknown:
            raise invalid(
                f"{text}: this server does not have it", unknown.group(1), "unknown_parameter"
            ) from None
        place = re.search(r"at `\$\.?(.*?)`", text) or re.search(r"required field `(.*?)`", text)
        raise invalid(text, place.group(1) if place else None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def check_model(service: Service, asked: str) -> None:
    """Raise ``ApiError`` (404) unless the model is the one that is served."""
    if asked != service.name:
        raise ApiError(
            404,
            f"the model {asked!r} is not served; {service.name!r} is",
            param="model",
            code="model_not_found",
        )


def output_tokens(
    service: Service, prompt: Sequence[int], asked: int | None, *, default: int, param: str
) -> int:
    """Return how many tokens may come after a prompt.

    Raises
    ------
    ApiError
        The prompt is empty or too long, or more is asked than there may be.
    """
    options, context = service.options, service.context
    if not prompt:
        raise invalid("the prompt is empty", param)
    bound = min(options.max_prompt_tokens, context - 1)
    if len(prompt) > bound:
        raise invalid(f"the prompt has {len(prompt)} tokens; allowed are {bound}", param, TOO_LONG)
    if max(prompt) >= service.vocab_size:
        raise invalid(f"token ids are 0 to {service.vocab_size - 1}, not {max(prompt)}", param)
    room = min(options.max_output_tokens, context - len(prompt))
    if asked is not None and asked > room:
        raise invalid(
            f"max_tokens={asked}: after {len(prompt)} prompt tokens allowed are {room}",
            "max_tokens",
            TOO_LONG,
        )
    return min(default, room) if asked is None else asked


def to_params(
    service: Service, asked: Sampling, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters; ``temperature`` and ``top_p`` are 1 where not given.

    Raises
    ------
    ApiError
        They make no sense.
    """
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    try:
        return SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(0, asked.top_k or 0),
            min_p=asked.min_p or 0.0,
            repetition_penalty=asked.repetition_penalty or 1.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=_bias(service, asked.logit_bias or {}),
            logprobs=logprobs,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            ignore_eos=bool(asked.ignore_eos),
            seed=None if asked.seed is None else asked.seed % (1 << 64),
        )
    except ValueError as error:
        raise invalid(str(error)) from None


def _bias(service: Service, asked: dict[str, float]) -> dict[int, float]:
    for key in asked:
        if not (key.isascii() and key.isdecimal() and int(key) < service.vocab_size):
            raise invalid(
                f"logit_bias: {key!r}: token ids are 0 to {service.vocab_size - 1}", "logit_bias"
            )
    return {int(key): value for key, value in asked.items()}


def check_stream(asked: Sampling) -> None:
    """Raise ``ApiError`` where options of streams are given and nothing is streamed."""
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options: only with stream=true", "stream_options")


def check_choices(service: Service, n: int | None) -> int:
    """Return the number of choices; ``ApiError`` if there are too many."""
    count = n or 1
    if count > service.options.max_choices:
        raise invalid(f"n={count}: allowed are 1 to {service.options.max_choices}", "n")
    return count


@dataclass(slots=True)
class Written:
    """A choice as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        if piece.token is not None:
            self.tokens.append(piece.token)
        if piece.text:
            self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        self.finish_reason, self.stop = piece.finish_reason, piece.stop


async def collect(generation: Generation, count: int) -> list[Written]:
    """Wait for all choices."""
    choices = [Written() for _ in range(count)]
    async for pieces in generation.pieces():
        for piece in pieces:
            choices[piece.index].add(piece)
    return choices


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Return the usage."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def token_logprob(service: Service, token: int, found: Logprobs) -> TokenLogprob:
    """Return what a chat says about a token."""
    own = _spelled(service, token, found.token)
    top = [_spelled(service, *pair) for pair in found.top]
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


def _spelled(service: Service, token: int, logprob: float) -> TopLogprob:
    text = service.spell(token)
    whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return TopLogprob(text, finite(logprob), whole)


def finite(logprob: float) -> float:
    """Return a logarithm that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


async def encode_text(service: Service, text: str) -> list[int]:
    """Tokenise; a text that could tie up the event loop does so in a thread."""
    return await service.read(service.tokenizer.encode, text)


async def encode_conversation(
    service: Service, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids before the model's answer; ``ApiError`` if it knows no such form."""
    try:
        return await service.read(service.tokenizer.encode_chat, messages, tools)
    except ConfigError as error:
        raise invalid(str(error), "messages") from None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that is being continued: by one choice."""

    id: str
    prompt: list[int]
    generation: Generation


async def converse(
    service: Service,
    kind: str,
    messages: list[dict[str, Any]],
    asked: Sampling,
    *,
    limit: int | None,
    param: str,
    constraint: GrammarConstraint | None = None,
) -> Conversation:
    """Begin the answer to a conversation.

    Parameters
    ----------
    kind
        What its id begins with.
    limit, param
        How many tokens it may have, where that is said, and the option that holds the messages.

    Raises
    ------
    ApiError
        It cannot be served.
    """
    prompt = await encode_conversation(service, messages)
    most = service.options.max_output_tokens
    max_tokens = output_tokens(service, prompt, limit, default=most, param=param)
    params = to_params(service, asked, max_tokens=max_tokens, logprobs=None)
    call_id = new_id(kind)
    generation = service.generate(call_id, [prompt], params, 1, constraint)
    return Conversation(call_id, prompt, generation)
