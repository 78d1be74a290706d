"""Check a request's options and convert them to the engine's SamplingParams and constraints."""

from __future__ import annotations

from typing import Any

import msgspec

from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.server.constraints.grammar_compiler import GrammarSource
from labkit.server.constraints.min_tokens import MinTokensConstraint
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.service import Service
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.openai_types import Sampling, StructuredOutputs

MAX_LOGIT_BIASES = 1024


def check_model(service: Service, model: str) -> None:
    """Raise ``ApiError`` (404) unless ``model`` is the served model's name."""
    if model != service.name:
        raise ApiError(
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
    """Return the engine's sampling parameters. Raises ``ApiError`` if one is invalid."""
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
    if len(bias) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias: {len(bias)} ids; the limit is {MAX_LOGIT_BIASES}", "logit_bias")
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
    """Raise ``ApiError`` if an option sets the output's length, as a grammar in ``other`` does."""
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
    names = outputs.__struct_fields__
    given = [n for n in names if getattr(outputs, n) or (n == "json" and outputs.json is not None)]
    if len(given) != 1:
        raise invalid(f"structured_outputs: set exactly one of {', '.join(names)}", param)
    grammars = service.grammars
    if outputs.regex is not None:
        return await grammars.build(GrammarSource("regex", outputs.regex), param)
    if outputs.choice is not None:
        return await grammars.from_choices(outputs.choice, param)
    if outputs.grammar is not None:
        return await grammars.build(GrammarSource("lark", outputs.grammar), param)
    schema = {"type": "object"} if outputs.json is None else outputs.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"structured_outputs.json: {error}", param) from None
    return await grammars.from_schema(schema, param)


def requested_priority(service: Service, priority: int | None) -> int:
    """Return a request's priority, by default 0.

    Raises ``ApiError`` if it is another one, and the engine's queue takes none.
    """
    if priority and not service.takes_priorities:
        reason = "needs engine.scheduler.queue=priority, or a queue class of your own"
        if service.engine_name == "mlx_lm":
            reason = "engine=mlx_lm takes no priorities"
        raise invalid(f"priority={priority}: {reason}", "priority")
    return priority or 0


def num_choices(service: Service, n: int | None) -> int:
    """Return the number of choices, by default 1. Raises ``ApiError`` if the limit is lower."""
    count = n or 1
    if count > service.options.max_choices:
        raise invalid(
            f"n={count}: must be at most {service.options.max_choices} (server.max_choices)", "n"
        )
    return count
