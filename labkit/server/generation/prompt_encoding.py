"""Convert prompts to token ids, and check their lengths.

Tokenising a long text takes seconds, so a text with too many characters is refused before it is
tokenised: a text of N characters has at least N / ``Tokenizer.max_token_characters`` tokens. Long
texts wait for each other, but short ones do not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.config import ConfigError
from labkit.models.chat_template import RenderOptions
from labkit.models.tokenizer import LONG_TEXT
from labkit.server.generation.service import Service
from labkit.server.generation.template_messages import in_call_order
from labkit.server.types.api_error import ApiError, invalid

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


async def encode_text(service: Service, text: str) -> list[int]:
    """Return a text's ids, computed in a thread. Raises ``ApiError`` if it is far too long."""
    _check_characters(service, len(text), "prompt")
    return await service.run_in_thread(service.tokenizer.encode, text, long=is_long(text))


async def encode_conversation(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    param: str = "messages",
    options: RenderOptions | None = None,
) -> list[int]:
    """Return the token ids of a conversation's prompt.

    ``param`` is the request's field that contains the messages, for error messages. Raises
    ``ApiError`` if the conversation is too long, the chat template rejects the messages, or the
    model has no chat template.
    """
    escape = service.special_token_escape

    def encode() -> list[int]:
        return service.tokenizer.encode_pieces(pieces)

    try:
        ordered, definitions = await service.run_in_thread(
            escape.mark, [in_call_order(messages), tools]
        )
        text = await service.templates.render(ordered, definitions, options)
        pieces = escape.split(text)
        _check_characters(service, sum(map(len, pieces)), param)
        return await service.run_in_thread(encode, long=is_long(text))
    except ConfigError as error:
        raise invalid(str(error), param) from None
    except RecursionError:
        raise invalid(f"{param}: a tool or a call is nested too deeply", param) from None


def is_long(value: Sequence[object]) -> bool:
    """Return whether it takes long to tokenise a text, or to decode token ids."""
    return len(value) >= LONG_TEXT


def check_contents(service: Service, contents: Iterable[object], param: str) -> None:
    """Check the number of messages and parts of a conversation before it is rendered.

    ``contents`` has each message's content. A content that is not a list has no parts. Raises
    ``ApiError`` if there are more messages and parts than a prompt may have tokens.
    """
    count = sum(1 + (len(item) if isinstance(item, list) else 0) for item in contents)
    if count > service.max_prompt_tokens:
        raise invalid(
            f"{param}: {count} messages and parts; the limit is {service.max_prompt_tokens}",
            param,
            CONTEXT_LENGTH_EXCEEDED,
        )


def _check_characters(service: Service, count: int, param: str) -> None:
    min_tokens = -(-count // service.tokenizer.max_token_characters)
    if min_tokens > service.max_prompt_tokens:
        raise _too_long(service, f"at least {min_tokens} tokens ({count} characters)", param)


def _too_long(service: Service, length: str, param: str) -> ApiError:
    return invalid(
        f"the prompt has {length}; the limit is {service.max_prompt_tokens} tokens",
        param,
        CONTEXT_LENGTH_EXCEEDED,
    )


def resolve_max_tokens(
    service: Service,
    prompt: Sequence[int],
    max_tokens: int | None,
    *,
    param: str,
    default: int | None = None,
    min_tokens: int = 0,
) -> int:
    """Return the maximum number of tokens to generate, limited to what fits after the prompt.

    ``max_tokens`` is the maximum that the client requested, or None. Then it is ``default`` or, if
    that is None, as many tokens as the context and the server's limit allow. ``param`` is the
    request's field that contains the prompt, for error messages. Raises ``ApiError`` if the prompt
    is empty, too long, or contains an id outside the vocabulary, ``max_tokens`` exceeds the
    server's limit, or the context has no room for ``min_tokens`` after the prompt.
    """
    if not prompt:
        raise invalid("the prompt is empty", param)
    if len(prompt) > service.max_prompt_tokens:
        raise _too_long(service, f"{len(prompt)} tokens", param)
    if max(prompt) >= service.vocab_size:
        raise invalid(f"token id {max(prompt)}: must be 0 to {service.vocab_size - 1}", param)
    limit, room = service.options.max_output_tokens, service.max_model_len - len(prompt)
    if max_tokens is not None and limit is not None and max_tokens > limit:
        raise invalid(
            f"max_tokens={max_tokens}: the limit is {limit} (server.max_output_tokens)",
            "max_tokens",
        )
    if min_tokens > room:
        raise invalid(
            f"{min_tokens} output tokens do not fit: after {len(prompt)} prompt tokens the "
            f"context has room for {room}",
            "max_tokens",
            CONTEXT_LENGTH_EXCEEDED,
        )
    bounds = (room, limit, default if max_tokens is None else max_tokens)
    return min(bound for bound in bounds if bound is not None)
