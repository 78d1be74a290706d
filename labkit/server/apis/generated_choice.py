"""A choice of a response: its tokens, text and log probabilities, as the APIs return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.server.generation.api_generation import Generation, TokenOutput
from labkit.server.generation.service import Service
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import PromptTokensDetails, TokenLogprob, TopLogprob, Usage

MIN_LOGPROB = -9999.0  # JSON has no infinity
MAX_LOGPROBS_ON_LOOP = 1000  # of a body that is built on the event loop, in about 3 ms
MAX_LOGPROBS_PER_RESPONSE = 1 << 18  # in a body of about 20 MB


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
    """Return the body that ``write`` makes of all choices of a response.

    A body with many log probabilities is built in a thread, because it may take seconds.
    """
    count = sum(1 + len(item.top) for choice in choices for item in choice.logprobs)
    has_prompt = any(choice.prompt_logprobs is not None for choice in choices)
    if has_prompt or count > MAX_LOGPROBS_ON_LOOP:
        return await service.run_in_thread(write, choices, long=True)
    return write(choices)


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
