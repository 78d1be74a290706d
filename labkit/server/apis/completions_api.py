"""``/v1/completions``: completes one or more prompts, given as texts or as token ids.

A response is a single JSON body, or the chunks of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer
from labkit.server.apis.generated_choice import ChoicesWriter, GeneratedChoice
from labkit.server.apis.request_checks import (
    check_model,
    check_stream,
    min_output,
    min_tokens_constraint,
    num_choices,
    requested_priority,
    structured_grammar,
    to_params,
)
from labkit.server.apis.response_logprobs import (
    check_prompt_logprobs,
    clamp_logprob,
    prompt_logprob_objects,
    prompt_logprobs_by_token,
    token_offsets,
)
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.http_response import GenerationResponse, sse_event
from labkit.server.generation.prompt_encoding import encode_text, resolve_max_tokens
from labkit.server.generation.service import CopyableConstraint, Service, new_id
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import (
    Completion,
    CompletionRequest,
    TextChoice,
    TextLogprobs,
)
from labkit.server.types.request_decoder import decode

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
EMPTY = TextLogprobs([], [], [], [])
_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(service: Service, body: bytes) -> GenerationResponse:
    """Return the response that sends a request's outputs. Raises ``ApiError`` if it is refused."""
    request = decode(_decoder, body)
    check_model(service, request.model)
    check_stream(request)
    prompt_only = _is_prompt_only(request)
    n = num_choices(service, request.n)
    priority = requested_priority(service, request.priority)
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
    check_prompt_logprobs(prompts, n, num_top)
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
        constraint = min_tokens_constraint(service, request, 0 if prompt_only else min(allowed))
    call_id = new_id("cmpl")
    texts = await _prompt_texts(service, request, prompts)
    generation = service.generate(
        call_id,
        prompts,
        params,
        n,
        constraint,
        max_tokens=allowed,
        prompt_only=prompt_only,
        priority=priority,
    )
    writer = CompletionWriter(service, request, call_id, generation, prompts, texts, n)
    return GenerationResponse(generation, service.options.timeout_s, writer, request.stream)


def _is_prompt_only(request: CompletionRequest) -> bool:
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise invalid("max_tokens=0 needs echo=true or prompt_logprobs", "max_tokens")
    return request.max_tokens == 0


def _num_top_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return how many likeliest tokens are scored at each position of the prompt, or None."""
    counts = (request.prompt_logprobs, request.logprobs if request.echo else None)
    return max((count for count in counts if count is not None), default=None)


async def _prompt_texts(
    service: Service, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[str]:
    """Return each prompt's text for ``echo``, decoded if it was given as ids; else empty texts."""
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


class CompletionWriter(ChoicesWriter):
    """Writes a generation as a response of the completions API.

    ``prompt_texts`` are the prompts as text. They are read only if the request has ``echo``.
    """

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        call_id: str,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        prompt_texts: Sequence[str],
        n: int,
    ) -> None:
        super().__init__(service, request, call_id, generation, prompts, n)
        self._request = request
        self._prompt_texts = prompt_texts
        self._started: set[int] = set()
        self._text_offsets = [0] * (len(prompts) * n)
        # One for each choice. The offset of a token is where its text begins in the choice's text,
        # so all tokens of a character have the same.
        self._detokenizers = [
            IncrementalDetokenizer(service.tokenizer, prompt)
            for prompt in (prompts if request.logprobs is not None else ())
            for _ in range(n)
        ]
        self._has_text_only = not (
            request.echo
            or request.return_token_ids
            or request.logprobs is not None
            or request.prompt_logprobs is not None
        )

    def _body(self, generated: Sequence[GeneratedChoice]) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(generated)]
        num_tokens = sum(len(choice.tokens) for choice in generated)
        return self._encoded(choices, self._usage(num_tokens))

    async def _chunks(self, output: TokenOutput, current: Any) -> list[bytes]:
        if not self._has_chunk(output):
            return []
        return [self._chunk([await self._next_part(output)], current)]

    def _chunk(self, choices: list[TextChoice], current: Any) -> bytes:
        return sse_event(self._encoded(choices, current))

    async def _next_part(self, output: TokenOutput) -> TextChoice:
        if self._has_text_only:
            return TextChoice(output.index, output.text, output.finish_reason)
        generated = GeneratedChoice()
        generated.add(output)
        if generated.prompt_logprobs is None:
            return self._choice(output.index, generated)
        return await self._service.run_in_thread(self._choice, output.index, generated, long=True)

    def _has_chunk(self, output: TokenOutput) -> bool:
        request = self._request
        if request.return_token_ids or (request.echo and output.index not in self._started):
            return True
        return bool(output.text or output.logprobs or output.finish_reason)

    def _choice(self, index: int, generated: GeneratedChoice) -> TextChoice:
        """Return a choice or, in a stream, its next part. The first may have the prompt."""
        request, prompt = self._request, self._prompts[index // self._n]
        is_first, ids = index not in self._started, bool(request.return_token_ids)
        self._started.add(index)
        text, logprobs = generated.text, []
        if is_first and request.echo:
            prompt_text = self._prompt_texts[index // self._n]
            text = prompt_text + text
            self._text_offsets[index] = len(prompt_text)
            logprobs = [self._echoed_logprobs(prompt, prompt_text, generated.prompt_logprobs)]
        logprobs.append(self._output_logprobs(index, generated))
        return TextChoice(
            index,
            text,
            cast(Any, generated.finish_reason),
            None if request.logprobs is None else _joined(logprobs),
            generated.tokens if ids else UNSET,
            list(prompt) if ids and is_first else UNSET,
            prompt_logprob_objects(
                self._service, prompt, generated.prompt_logprobs, request.prompt_logprobs
            ),
        )

    def _echoed_logprobs(
        self, prompt: Sequence[int], text: str, logprobs: PromptLogprobs | None
    ) -> TextLogprobs:
        if self._request.logprobs is None:
            return EMPTY
        by_token = prompt_logprobs_by_token(logprobs, prompt, self._request.logprobs)
        offsets = token_offsets(self._service.tokenizer, text, prompt)
        return self._text_logprobs(prompt, by_token, offsets)

    def _output_logprobs(self, index: int, generated: GeneratedChoice) -> TextLogprobs:
        if self._request.logprobs is None:
            return EMPTY
        offsets = []
        for token in generated.tokens:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(self._detokenizers[index].add(token))
        return self._text_logprobs(generated.tokens, generated.logprobs, offsets)

    def _text_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None], offsets: list[int]
    ) -> TextLogprobs:
        texts = [self._service.token_text(token) for token in tokens]
        own = [None if item is None else clamp_logprob(item.token) for item in logprobs]
        # Each is encoded by itself: encoding many in one call would hold the GIL.
        top: Any = [
            None
            if item is None
            else msgspec.Raw(_encode(top_by_text(self._service.token_text, token, item)))
            for token, item in zip(tokens, logprobs, strict=True)
        ]
        return TextLogprobs(texts, own, top, offsets)

    def _encoded(self, choices: list[TextChoice], current: Any) -> bytes:
        created, name = self._generation.created, self._service.name
        return _encode(Completion(self._id, "text_completion", created, name, choices, current))


def top_by_text(
    token_text: Callable[[int], str], token: int, logprobs: Logprobs
) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of ``token``, by the tokens' texts.

    If several tokens have the same text, for example parts of a character, the text maps to the
    likeliest one's log probability.
    """
    top: dict[str, float] = {}
    for other, value in (*logprobs.top, (token, logprobs.token)):
        top.setdefault(token_text(other), clamp_logprob(value))
    return top


def _joined(parts: Sequence[TextLogprobs]) -> TextLogprobs:
    names = TextLogprobs.__struct_fields__
    return TextLogprobs(
        *([item for part in parts for item in getattr(part, name)] for name in names)
    )
