"""``/v1/completions``: completes one or more prompts, given as texts or as token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs
from labkit.server.api_error import invalid
from labkit.server.api_generation import Generation
from labkit.server.endpoint_helpers import (
    GeneratedChoice,
    check_choices,
    check_model,
    check_stream,
    clamp_logprob,
    collect,
    decode,
    min_output,
    min_tokens_constraint,
    structured_grammar,
    to_params,
    usage,
)
from labkit.server.openai_types import (
    Completion,
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    Usage,
)
from labkit.server.prompt_encoding import encode_text, resolve_max_tokens
from labkit.server.response_streams import DONE, GenerationResponse, sse_event
from labkit.server.serving_service import CopyableConstraint, Service, new_id

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Decode a request, start its generation and return the response that will send the outputs.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    n = check_choices(service, request.n)
    service.check_num_completions(_num_prompts(request.prompt) * n)
    prompts = await _prompts(service, request.prompt)
    allowed = [
        resolve_max_tokens(
            service,
            p,
            request.max_tokens,
            param="prompt",
            default=max(DEFAULT_MAX_TOKENS, request.min_tokens or 0),
            min_tokens=min_output(request, request.max_tokens),
        )
        for p in prompts
    ]
    max_tokens = min(allowed)
    params = to_params(service, request, max_tokens=max_tokens, logprobs=request.logprobs)
    constraint: CopyableConstraint | None
    if request.structured_outputs is not None:
        constraint = await structured_grammar(service, request, request.structured_outputs)
    else:
        constraint = min_tokens_constraint(service, request, max_tokens)
    call_id = new_id("cmpl")
    generation = service.generate(call_id, prompts, params, n, constraint)
    writer = CompletionWriter(service, request, call_id, generation, prompts, n)
    timeout_s = service.options.timeout_s
    if request.stream:
        return GenerationResponse(generation, timeout_s, events=writer.events())
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


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


class CompletionWriter:
    """Writes a generation as a response of the completions API."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        call_id: str,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        n: int,
    ) -> None:
        self._service = service
        self._request = request
        self._id = call_id
        self._generation = generation
        self._prompts = prompts
        self._n = n
        self._text_offsets = [0] * (len(prompts) * n)

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        generated = await collect(self._generation, len(self._text_offsets))
        choices = [self._choice(index, choice) for index, choice in enumerate(generated)]
        num_tokens = sum(len(choice.tokens) for choice in generated)
        return _encode(self._completion(choices, self._usage(num_tokens)))

    def _choice(self, index: int, generated: GeneratedChoice) -> TextChoice:
        ids = bool(self._request.return_token_ids)
        return TextChoice(
            index,
            generated.text,
            cast(Any, generated.finish_reason),
            self._logprobs(index, generated.tokens, generated.logprobs),
            generated.tokens if ids else UNSET,
            list(self._prompts[index // self._n]) if ids else UNSET,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        continuous_usage = bool(options and options.continuous_usage_stats)
        ids, started = bool(self._request.return_token_ids), set()
        num_tokens = 0
        async for outputs in self._generation.outputs():
            parts = []
            for output in outputs:
                num_tokens += output.token is not None
                if not (output.text or ids or output.logprobs or output.finish_reason):
                    continue
                tokens = [] if output.token is None else [output.token]
                first = ids and output.index not in started
                started.add(output.index)
                logprobs = [output.logprobs] if output.logprobs else []
                choice = TextChoice(
                    output.index,
                    output.text,
                    output.finish_reason,
                    self._logprobs(output.index, tokens, logprobs),
                    tokens if ids else UNSET,
                    list(self._prompts[output.index // self._n]) if first else UNSET,
                )
                current: Any = None if with_usage else UNSET
                if continuous_usage:
                    current = self._usage(num_tokens)
                parts.append(sse_event(_encode(self._completion([choice], current))))
            if parts:
                yield b"".join(parts)
        usage_chunk = self._completion([], self._usage(num_tokens))
        yield (sse_event(_encode(usage_chunk)) if with_usage else b"") + DONE

    def _completion(self, choices: list[TextChoice], current: Any) -> Completion:
        created, name = self._generation.created, self._service.name
        return Completion(self._id, "text_completion", created, name, choices, current)

    def _usage(self, num_tokens: int) -> Usage:
        num_cached = self._generation.num_cached_tokens(self._n)
        return usage(sum(map(len, self._prompts)), num_tokens, num_cached)

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> TextLogprobs | None:
        if self._request.logprobs is None:
            return None
        token_text = self._service.token_text
        texts = [token_text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(text)
        chosen = [clamp_logprob(item.token) for item in logprobs]
        top = [
            {token_text(token): clamp_logprob(value) for token, value in item.top} | {text: own}
            for text, own, item in zip(texts, chosen, logprobs, strict=True)
        ]
        return TextLogprobs(texts, chosen, top, offsets)
