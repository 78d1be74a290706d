"""``/v1/completions``: completes one or more prompts, given as texts or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from labkit.server.apis import prompt_logprobs_format
from labkit.server.apis.completions_writer import CompletionWriter
from labkit.server.apis.request_checks import (
    check_model,
    check_stream,
    min_output,
    min_tokens_constraint,
    num_choices,
    structured_grammar,
    to_params,
)
from labkit.server.generation.http_response import GenerationResponse
from labkit.server.generation.prompt_encoding import encode_text, resolve_max_tokens
from labkit.server.generation.service import CopyableConstraint, Service, new_id
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import CompletionRequest
from labkit.server.types.request_decoder import decode

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_decoder = msgspec.json.Decoder(CompletionRequest)


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises ``ApiError`` if the request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    prompt_only = _is_prompt_only(request)
    n = num_choices(service, request.n)
    service.check_num_completions(_num_prompts(request.prompt) * n)
    prompts = await _prompts(service, request.prompt)
    allowed = [
        resolve_max_tokens(
            service,
            p,
            1 if prompt_only else request.max_tokens,
            param="prompt",
            default=max(DEFAULT_MAX_TOKENS, request.min_tokens or 0),
            min_tokens=min_output(request, request.max_tokens),
        )
        for p in prompts
    ]
    num_top = _num_top_prompt_logprobs(request)
    prompt_logprobs_format.check_count(prompts, n, num_top)
    params = to_params(
        service,
        request,
        max_tokens=max(allowed),
        logprobs=None if prompt_only else request.logprobs,
        prompt_logprobs=num_top,
    )
    constraint: CopyableConstraint | None
    if request.structured_outputs is not None:
        constraint = await structured_grammar(service, request, request.structured_outputs)
    else:
        constraint = min_tokens_constraint(service, request, min(allowed))
    call_id = new_id("cmpl")
    texts = await _prompt_texts(service, request, prompts)
    generation = service.generate(
        call_id, prompts, params, n, constraint, max_tokens=allowed, prompt_only=prompt_only
    )
    writer = CompletionWriter(service, request, call_id, generation, prompts, texts, n)
    timeout_s = service.options.timeout_s
    if request.stream:
        return GenerationResponse(generation, timeout_s, events=writer.events())
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


def _is_prompt_only(request: CompletionRequest) -> bool:
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise invalid("max_tokens=0 needs echo=true or prompt_logprobs", "max_tokens")
    return request.max_tokens == 0


def _num_top_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return how many of the likeliest tokens are scored at each position of the prompt.

    Returns None if the response has no log probabilities of the prompt.
    """
    counts = (request.prompt_logprobs, request.logprobs if request.echo else None)
    return max((count for count in counts if count is not None), default=None)


async def _prompt_texts(
    service: Service, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[str]:
    """Return each prompt's text for ``echo``; prompts given as token ids are decoded.

    Without ``echo``, every text is empty.
    """
    if not request.echo:
        return [""] * len(prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if isinstance(given[0], str):
        return [str(text) for text in given]
    return [await service.run_in_thread(service.tokenizer.decode, list(ids)) for ids in prompts]


def _num_prompts(prompt: str | list[Any]) -> int:
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


async def _prompts(service: Service, prompt: str | list[Any]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await encode_text(service, prompt)]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {list}:
        return prompt
    if kinds == {str}:
        return [await encode_text(service, text) for text in prompt]
    raise invalid("prompt must be texts or token ids, not both", "prompt")
