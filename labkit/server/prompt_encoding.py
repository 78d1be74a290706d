"""The token ids of prompts, whose lengths are checked before they are tokenised.

Tokenising a long text takes seconds, so a text with too many characters is refused first: a text
of N characters has at least N / ``Tokenizer.max_token_characters`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.config import ConfigError
from labkit.server.api_error import ApiError, invalid
from labkit.server.serving_service import Service

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


async def encode_text(service: Service, text: str, param: str = "prompt") -> list[int]:
    """Return a text's token ids, computed in a thread so that the event loop is not blocked.

    ``param`` is the request's field that contains the text, for error messages.

    Raises
    ------
    ApiError
        The text has more characters than the longest prompt can have.
    """
    _check_characters(service, text, param)
    return await service.run_in_thread(service.tokenizer.encode, text)


async def encode_conversation(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    param: str = "messages",
) -> list[int]:
    """Return the token ids of a conversation's prompt.

    ``param`` is the request's field that contains the messages, for error messages.

    Raises
    ------
    ApiError
        The conversation is too long, the chat template rejects the messages, or the model has no
        chat template.
    """

    def encode() -> list[int]:
        try:
            text = service.tokenizer.render_chat(messages, tools)
        except ConfigError as error:
            raise invalid(str(error), param) from None
        _check_characters(service, text, param)
        return service.tokenizer.encode(text, special=False)

    return await service.run_in_thread(encode)


def check_contents(service: Service, contents: Iterable[object], param: str) -> None:
    """Check the number of messages and parts of a conversation before it is rendered.

    ``contents`` has each message's content: a list of parts, or anything else.

    Raises
    ------
    ApiError
        There are more messages and parts than a prompt may have tokens.
    """
    count = sum(1 + (len(item) if isinstance(item, list) else 0) for item in contents)
    if count > service.max_prompt_tokens:
        raise invalid(
            f"{param}: {count} messages and parts; the limit is {service.max_prompt_tokens}",
            param,
            CONTEXT_LENGTH_EXCEEDED,
        )


def _check_characters(service: Service, text: str, param: str) -> None:
    min_tokens = -(-len(text) // service.tokenizer.max_token_characters)
    if min_tokens > service.max_prompt_tokens:
        raise _too_long(service, f"at least {min_tokens} tokens ({len(text)} characters)", param)


def check_prompt(service: Service, prompt: Sequence[int], param: str) -> None:
    """Check a prompt's length and its token ids.

    Raises
    ------
    ApiError
        The prompt is empty, too long, or contains an id outside the vocabulary.
    """
    if not prompt:
        raise invalid("the prompt is empty", param)
    if len(prompt) > service.max_prompt_tokens:
        raise _too_long(service, f"{len(prompt)} tokens", param)
    if max(prompt) >= service.vocab_size:
        raise invalid(f"token ids are 0 to {service.vocab_size - 1}, not {max(prompt)}", param)


def _too_long(service: Service, length: str, param: str) -> ApiError:
    return invalid(
        f"the prompt has {length}; the limit is {service.max_prompt_tokens} tokens",
        param,
        CONTEXT_LENGTH_EXCEEDED,
    )


def resolve_max_tokens(
    service: Service, prompt: Sequence[int], max_tokens: int | None, *, default: int, param: str
) -> int:
    """Return the maximum number of tokens to generate: ``max_tokens``, or if None a default.

    The default is ``default`` or, if less, the number of tokens that still fit after the prompt.
    ``param`` is the request's field that contains the prompt.

    Raises
    ------
    ApiError
        The prompt is invalid (see ``check_prompt``), or prompt plus ``max_tokens`` exceeds the
        limits of the model or the server.
    """
    check_prompt(service, prompt, param)
    room = min(service.options.max_output_tokens, service.max_model_len - len(prompt))
    if max_tokens is not None and max_tokens > room:
        raise invalid(
            f"max_tokens={max_tokens}: after {len(prompt)} prompt tokens allowed are {room}",
            "max_tokens",
            CONTEXT_LENGTH_EXCEEDED,
        )
    return min(default, room) if max_tokens is None else max_tokens
