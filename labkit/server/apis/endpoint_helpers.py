"""Helpers that the endpoints share: request checks, sampling parameters, logprobs and usage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.engine.request import SamplingParams
from labkit.models.chat_template import RenderOptions
from labkit.server.apis.requested_tools import RequestedTools
from labkit.server.constraints.min_tokens import MinTokensConstraint
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.prompt_encoding import encode_conversation, resolve_max_tokens
from labkit.server.generation.serving_service import Service, new_id
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.openai_types import (
    PromptTokensDetails,
    Sampling,
    StructuredOutputs,
    TokenLogprob,
    TopLogprob,
    Usage,
)

MIN_LOGPROB = -9999.0  # JSON has no infinity


def check_model(service: Service, model: str) -> None:
    """Raise ``ApiError`` (404) unless ``model`` is the served model's name."""
    if model != service.name:
        raise model_not_found(service, model)


def model_not_found(service: Service, model: str) -> ApiError:
    """Return the error for a model that is not served."""
    return ApiError(
        404,
        f"model={model!r}: not served; use {service.name!r}",
        param="model",
        code="model_not_found",
    )


def to_params(
    service: Service,
    sampling: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the engine's sampling parameters. ``temperature`` and ``top_p`` default to 1.

    Raises ``ApiError`` if a parameter is invalid.
    """
    stop = sampling.stop or ()  # an empty stop string is ignored
    try:
        return SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=max(0, sampling.top_k or 0),
            min_p=sampling.min_p or 0.0,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            presence_penalty=sampling.presence_penalty or 0.0,
            frequency_penalty=sampling.frequency_penalty or 0.0,
            logit_bias=_logit_bias(service, sampling.logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(sampling.stop_token_ids or ()),
            ignore_eos=bool(sampling.ignore_eos),
            seed=None if sampling.seed is None else sampling.seed % (1 << 64),
        )
    except ValueError as error:
        raise invalid(str(error)) from None


def _logit_bias(service: Service, bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > service.vocab_size:
        raise invalid(
            f"logit_bias: {len(bias)} ids; the vocabulary has {service.vocab_size}", "logit_bias"
        )
    for key in bias:
        if not (key.isascii() and key.isdecimal() and int(key) < service.vocab_size):
            raise invalid(
                f"logit_bias: token id {key!r}: must be 0 to {service.vocab_size - 1}", "logit_bias"
            )
    return {int(key): value for key, value in bias.items()}


def check_stream(sampling: Sampling) -> None:
    """Raise ``ApiError`` if an option is set that the value of ``stream`` does not allow."""
    if sampling.stream and sampling.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be combined with stream=true", "prompt_logprobs")
    if sampling.stream_options is not None and not sampling.stream:
        raise invalid("stream_options needs stream=true", "stream_options")


def check_free_length(sampling: Sampling, other: str) -> None:
    """Raise ``ApiError`` if an option sets the output's length, because a grammar determines it.

    ``other`` is the request's field that contains the grammar.
    """
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise invalid(f"{name} cannot be combined with {other}", name)


def min_output(sampling: Sampling, max_tokens: int | None) -> int:
    """Return the number of output tokens that must fit into the context after the prompt.

    It is ``min_tokens`` or, with ``ignore_eos``, ``max_tokens``: the output cannot end earlier.
    """
    return max(sampling.min_tokens or 0, (max_tokens or 0) if sampling.ignore_eos else 0)


def min_tokens_constraint(
    service: Service, sampling: Sampling, max_tokens: int
) -> MinTokensConstraint | None:
    """Return the constraint that enforces ``min_tokens``, or None if it is not needed.

    Raises ``ApiError`` if ``min_tokens`` exceeds ``max_tokens``, or a stop string could end the
    output earlier.
    """
    min_tokens = sampling.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens={min_tokens}: must be at most max_tokens={max_tokens}", "min_tokens"
        )
    if min_tokens and sampling.stop:
        raise invalid("min_tokens cannot be combined with stop", "min_tokens")
    ending_ids = set(sampling.stop_token_ids or ())
    ending_ids.update(() if sampling.ignore_eos else service.eos_token_ids)
    if not (min_tokens and ending_ids):
        return None
    return MinTokensConstraint(min_tokens, [i for i in ending_ids if i < service.vocab_size])


async def structured_grammar(
    service: Service, sampling: Sampling, outputs: StructuredOutputs
) -> GrammarConstraint:
    """Return the grammar of ``structured_outputs``.

    Raises ``ApiError`` if the grammar cannot be enforced, or the request sets none or several of
    the fields.
    """
    param = "structured_outputs"
    check_free_length(sampling, param)
    fields = [name for name in outputs.__struct_fields__ if getattr(outputs, name)]
    if outputs.json is not None and "json" not in fields:
        fields.append("json")
    if len(fields) != 1:
        raise invalid(
            f"structured_outputs: set exactly one of {', '.join(outputs.__struct_fields__)}", param
        )
    grammars = service.grammars
    if outputs.regex is not None:
        return await grammars.from_regex(outputs.regex, param)
    if outputs.choice is not None:
        return await grammars.from_choices(outputs.choice, param)
    if outputs.grammar is not None:
        return await grammars.from_lark(outputs.grammar, param)
    schema = {"type": "object"} if outputs.json is None else outputs.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"structured_outputs.json: {error}", param) from None
    return await grammars.from_schema(schema, param)


def check_choices(service: Service, n: int | None) -> int:
    """Return the number of choices, by default 1.

    Raises ``ApiError`` if ``n`` exceeds ``server.max_choices``.
    """
    count = n or 1
    if count > service.options.max_choices:
        raise invalid(
            f"n={count}: must be at most {service.options.max_choices} (server.max_choices)", "n"
        )
    return count


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
    """Wait until all ``count`` choices have ended and return them."""
    choices = [GeneratedChoice() for _ in range(count)]
    async for outputs in generation.outputs():
        for output in outputs:
            choices[output.index].add(output)
    return choices


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Return the usage object.

    ``cached_tokens`` is the number of prompt tokens that were in the prefix cache.
    """
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
    compile_grammar: Callable[[], Awaitable[GrammarConstraint | None]] | None = None,
    options: RenderOptions | None = None,
) -> Conversation:
    """Start generating the next message of a conversation.

    Parameters
    ----------
    kind
        Prefix of the response's id.
    tools
        The tools that the model may call.
    limit
        The maximum number of tokens that the client requested, or None.
    param
        The request's field that contains the messages, for error messages.
    compile_grammar
        Returns the grammar that the message must match, or None if any text is allowed. Called
        when the prompt has been accepted. If it returns None, the grammar of ``tools`` applies.
    options
        Options of the chat template.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    prompt = await encode_conversation(
        service, messages, tools.definitions, param=param, options=options
    )
    max_tokens = resolve_max_tokens(service, prompt, limit, param=param)
    params = to_params(service, sampling, max_tokens=max_tokens, logprobs=None)
    constraint = await compile_grammar() if compile_grammar else None
    constraint = constraint or await tools.grammar(service)
    call_id = new_id(kind)
    generation = service.generate(
        call_id, [prompt], params, 1, constraint, tools.single_call_parser
    )
    return Conversation(call_id, prompt, tools, generation)
