"""The responses of ``/v1/completions``: a single JSON body, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer
from labkit.server.apis import prompt_logprobs_format
from labkit.server.apis.generated_choice import (
    GeneratedChoice,
    build_body,
    clamp_logprob,
    collect,
    usage,
)
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.http_response import DONE, sse_event
from labkit.server.generation.service import Service
from labkit.server.types.openai_types import (
    Completion,
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    Usage,
)

EMPTY = TextLogprobs([], [], [], [])
_encode = msgspec.json.Encoder().encode


class CompletionWriter:
    """Writes a generation as a response of the completions API.

    ``prompt_texts`` are the prompts as text. They are read only if the request has ``echo``.
    ``n`` is the number of choices per prompt.
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
        self._service = service
        self._request = request
        self._id = call_id
        self._generation = generation
        self._prompts = prompts
        self._prompt_texts = prompt_texts
        self._n = n
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

    async def full_body(self) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        generated = await collect(self._generation, len(self._text_offsets))
        return await build_body(self._service, self._body, generated)

    def _body(self, generated: Sequence[GeneratedChoice]) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(generated)]
        num_tokens = sum(len(choice.tokens) for choice in generated)
        return _encode(self._completion(choices, self._usage(num_tokens)))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream in parts. Each part contains the events of one engine step."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        continuous_usage = with_usage and bool(options and options.continuous_usage_stats)
        num_tokens = 0
        async for outputs in self._generation.outputs():
            parts = []
            for output in outputs:
                num_tokens += output.token is not None
                if not self._has_chunk(output):
                    continue
                choice = await self._next_part(output)
                current: Any = None if with_usage else UNSET
                if continuous_usage:
                    current = self._usage(num_tokens)
                parts.append(sse_event(_encode(self._completion([choice], current))))
            if parts:
                yield b"".join(parts)
        usage_chunk = self._completion([], self._usage(num_tokens))
        yield (sse_event(_encode(usage_chunk)) if with_usage else b"") + DONE

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
        """Return a whole choice or, in a stream, its next part.

        A choice's first part also contains the prompt, if the request asks for it.
        """
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
            prompt_logprobs_format.to_objects(
                self._service, prompt, generated.prompt_logprobs, request.prompt_logprobs
            ),
        )

    def _echoed_logprobs(
        self, prompt: Sequence[int], text: str, logprobs: PromptLogprobs | None
    ) -> TextLogprobs:
        if self._request.logprobs is None:
            return EMPTY
        by_token = prompt_logprobs_format.by_token(logprobs, prompt, self._request.logprobs)
        offsets = prompt_logprobs_format.token_offsets(self._service.tokenizer, text, prompt)
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

    def _completion(self, choices: list[TextChoice], current: Any) -> Completion:
        created, name = self._generation.created, self._service.name
        return Completion(self._id, "text_completion", created, name, choices, current)

    def _usage(self, num_tokens: int) -> Usage:
        num_cached = self._generation.num_cached_tokens(self._n)
        return usage(sum(map(len, self._prompts)), num_tokens, num_cached)


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
