"""``/tokenize`` and ``/detokenize``, compatible with vLLM's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from labkit.server.apis.chat_api import encode_prompt
from labkit.server.apis.request_checks import check_model
from labkit.server.generation.http_response import json_response
from labkit.server.generation.prompt_encoding import encode_text, is_long
from labkit.server.generation.service import Service
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import ChatMessage, ChatRequest, JsonObject, TokenId, Tool
from labkit.server.types.request_decoder import decode

CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """The body of a ``POST /tokenize`` request: either a prompt or a conversation.

    A conversation has the prompt of a ``ChatRequest`` with the same ``CHAT_FIELDS``. The server
    always adds the model's special tokens to a prompt; to a conversation, the chat template does.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeResponse(Struct, frozen=True):
    """The response to a ``TokenizeRequest``.

    As in vLLM, ``token_strs`` has the tokens as the vocabulary spells them.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """The body of a ``POST /detokenize`` request."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True):
    """The response to a ``DetokenizeRequest``."""

    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(service: Service, body: bytes) -> Response:
    """Return the token ids of a prompt or conversation. Raises ``ApiError`` if it is invalid."""
    request = decode(_tokenize_decoder, body)
    check_model(service, request.model or service.name)
    tokens = await _encode(service, request)
    strings = (
        await service.run_in_thread(
            lambda: [service.tokenizer.vocabulary_token(token) for token in tokens],
            long=is_long(tokens),
        )
        if request.return_token_strs
        else UNSET
    )
    return json_response(TokenizeResponse(len(tokens), service.max_model_len, tokens, strings))


async def _encode(service: Service, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) is (request.messages is None):
        raise invalid("set either prompt or messages", "prompt")
    if request.add_special_tokens not in (None, request.messages is None):
        raise invalid(
            "add_special_tokens: this server supports only true for prompt and false for messages; "
            "leave it out",
            "add_special_tokens",
        )
    options = {name: getattr(request, name) for name in CHAT_FIELDS}
    if request.prompt is None:
        chat = ChatRequest(model=service.name, messages=request.messages or [], **options)
        return (await encode_prompt(service, chat))[0]
    for name in CHAT_FIELDS:
        if options[name]:
            raise invalid(f"{name} needs messages", name)
    return await encode_text(service, request.prompt)


async def detokenize(service: Service, body: bytes) -> Response:
    """Return the text of token ids. Raises ``ApiError`` if the request or an id is invalid."""
    request = decode(_detokenize_decoder, body)
    check_model(service, request.model or service.name)
    if len(request.tokens) > service.max_model_len:
        raise invalid(
            f"tokens: {len(request.tokens)} ids; the limit is {service.max_model_len}", "tokens"
        )
    if max(request.tokens, default=0) >= service.vocab_size:
        raise invalid(f"tokens: every token id must be 0 to {service.vocab_size - 1}", "tokens")
    text = await service.run_in_thread(
        service.tokenizer.decode, request.tokens, long=is_long(request.tokens)
    )
    return json_response(DetokenizeResponse(text))
