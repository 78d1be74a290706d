"""``/tokenize`` and ``/detokenize``, as vLLM has them: what a client's text is in tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from labkit.server.api_error import invalid
from labkit.server.chat_api import plain
from labkit.server.openai_types import ChatMessage, TokenId
from labkit.server.sampling_translation import check_model, decode, encode_conversation, encode_text
from labkit.server.serving_service import Service


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """``POST /tokenize``: a prompt, or a conversation as the model's template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None


class Tokens(Struct, frozen=True):
    """The answer to a ``TokenizeRequest``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


class Text(Struct, frozen=True):
    """The answer to a ``DetokenizeRequest``."""

    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(service: Service, body: bytes) -> Response:
    """Answer a ``TokenizeRequest``; ``ApiError`` where it cannot be."""
    request = decode(_tokenize, body)
    check_model(service, request.model or service.name)
    if (request.prompt is None) is (request.messages is None):
        raise invalid("give prompt or messages", "prompt")
    if request.prompt is not None:
        tokens = await encode_text(service, request.prompt)
    else:
        tokens = await encode_conversation(service, plain(request.messages or []))
    spelled = [service.tokenizer.piece(t) for t in tokens] if request.return_token_strs else UNSET
    return json_response(Tokens(len(tokens), service.context, tokens, spelled))


async def detokenize(service: Service, body: bytes) -> Response:
    """Answer a ``DetokenizeRequest``; ``ApiError`` where it cannot be."""
    request = decode(_detokenize, body)
    check_model(service, request.model or service.name)
    if max(request.tokens, default=0) >= service.vocab_size:
        raise invalid(f"tokens: ids are 0 to {service.vocab_size - 1}", "tokens")
    return json_response(Text(await service.read(service.tokenizer.decode, request.tokens)))


def json_response(value: Struct) -> Response:
    """Return an object as an answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")
