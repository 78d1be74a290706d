"""``/v1/completions``: prompts as text or token ids, completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs
from labkit.server.api_error import invalid
from labkit.server.api_generation import Generation
from labkit.server.openai_types import (
    Completion,
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    Usage,
)
from labkit.server.response_streams import DONE, GenerationResponse, event
from labkit.server.sampling_translation import (
    GeneratedChoice,
    check_choices,
    check_model,
    check_stream,
    collect,
    decode,
    encode_text,
    finite,
    output_tokens,
    to_params,
    usage,
)
from labkit.server.serving_service import Service, new_id

DEFAULT_MAX_TOKENS = 16  # the API's
_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Start the generation that a request's body asks for.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    n = check_choices(service, request.n)
    prompts = await _prompts(service, request.prompt)
    allowed = [
        output_tokens(service, p, request.max_tokens, default=DEFAULT_MAX_TOKENS, param="prompt")
        for p in prompts
    ]
    params = to_params(service, request, max_tokens=min(allowed), logprobs=request.logprobs)
    call_id = new_id("cmpl")
    generation = service.generate(call_id, prompts, params, n)
    writer = CompletionWriter(service, request, call_id, generation, prompts, n)
    timeout_s = service.options.timeout_s
    if request.stream:
        return GenerationResponse(generation, timeout_s, events=writer.events())
    return GenerationResponse(generation, timeout_s, body=writer.full_body)


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
    raise invalid("prompt: allowed are texts or token ids, not both", "prompt")


class CompletionWriter:
    """Writes a generation as the API's objects."""

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
        self._offsets = [0] * (len(prompts) * n)

    async def full_body(self) -> bytes:
        """Return the answer in one piece."""
        found = await collect(self._generation, len(self._offsets))
        choices = [self._choice(index, generated) for index, generated in enumerate(found)]
        generated = sum(len(choice.tokens) for choice in found)
        return _encode(self._completion(choices, self._usage(generated)))

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
        """Yield the answer as server-sent events, each step's together."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        running = bool(options and options.continuous_usage_stats)
        ids, told = bool(self._request.return_token_ids), set()
        generated = 0
        async for pieces in self._generation.pieces():
            parts = []
            for piece in pieces:
                generated += piece.token is not None
                if not (piece.text or ids or piece.logprobs or piece.finish_reason):
                    continue
                tokens = [] if piece.token is None else [piece.token]
                first = ids and piece.index not in told
                told.add(piece.index)
                choice = TextChoice(
                    piece.index,
                    piece.text,
                    piece.finish_reason,
                    self._logprobs(piece.index, tokens, [piece.logprobs] if piece.logprobs else []),
                    tokens if ids else UNSET,
                    list(self._prompts[piece.index // self._n]) if first else UNSET,
                )
                now: Any = self._usage(generated) if running else None if with_usage else UNSET
                parts.append(event(_encode(self._completion([choice], now))))
            if parts:
                yield b"".join(parts)
        last = event(_encode(self._completion([], self._usage(generated)))) if with_usage else b""
        yield last + DONE

    def _completion(self, choices: list[TextChoice], used: Any) -> Completion:
        created, name = self._generation.created, self._service.name
        return Completion(self._id, "text_completion", created, name, choices, used)

    def _usage(self, generated: int) -> Usage:
        return usage(sum(map(len, self._prompts)), generated)

    def _logprobs(
        self, index: int, tokens: Sequence[int], found: Sequence[Logprobs]
    ) -> TextLogprobs | None:
        if self._request.logprobs is None:
            return None
        piece = self._service.spell
        spelled = [piece(token) for token in tokens]
        offsets = []
        for text in spelled:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        top = [
            {piece(token): finite(value) for token, value in one.top} | {text: finite(one.token)}
            for text, one in zip(spelled, found, strict=True)
        ]
        return TextLogprobs(spelled, [finite(one.token) for one in found], top, offsets)
