"""The log probabilities in a response: those of its tokens, and of its prompt.

The log probabilities of a prompt are vLLM's ``prompt_logprobs``, and those of ``echo``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import UNSET, UnsetType

from labkit.engine.engine_protocol import Logprobs, PromptLogprobs
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer
from labkit.models.tokenizer import Tokenizer
from labkit.server.generation.service import Service
from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.openai_types import (
    PromptLogprob,
    PromptLogprobObjects,
    TokenLogprob,
    TopLogprob,
)

MIN_LOGPROB = -9999.0  # JSON has no infinity
MAX_LOGPROBS_PER_RESPONSE = 1 << 18  # in a body of about 20 MB
_encode = msgspec.json.Encoder().encode


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
