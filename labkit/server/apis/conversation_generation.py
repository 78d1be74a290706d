"""Starts generating the next message of a conversation, for the messages and responses APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from labkit.models.chat_template import RenderOptions
from labkit.server.apis.request_checks import to_params
from labkit.server.apis.requested_tools import RequestedTools
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.generation.api_generation import Generation
from labkit.server.generation.prompt_encoding import encode_conversation, resolve_max_tokens
from labkit.server.generation.service import Service, new_id
from labkit.server.types.openai_types import Sampling


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and the generation of its next message."""

    id: str
    prompt: list[int]
    tools: RequestedTools
    generation: Generation


async def converse(
    service: Service,
    kind: str,
    messages: list[dict[str, Any]],
    tools: RequestedTools,
    sampling: Sampling,
    *,
    limit: int | None,
    param: str,
    compile_grammar: Callable[[], Awaitable[GrammarConstraint | None]] | None = None,
    options: RenderOptions | None = None,
) -> Conversation:
    """Start generating the next message of a conversation.

    Parameters
    ----------
    kind
        Prefix of the response's id.
    tools
        The tools that the model may call.
    limit
        The maximum number of tokens that the client requested, or None.
    param
        The request's field that contains the messages, for error messages.
    compile_grammar
        Returns the grammar that the message must match, or None if any text is allowed. Called
        when the prompt has been accepted. If it returns None, the grammar of ``tools`` applies.
    options
        Options of the chat template.

    Raises
    ------
    ApiError
        The request cannot be served.
    """
    prompt = await encode_conversation(
        service, messages, tools.definitions, param=param, options=options
    )
    max_tokens = resolve_max_tokens(service, prompt, limit, param=param)
    params = to_params(service, sampling, max_tokens=max_tokens, logprobs=None)
    constraint = await compile_grammar() if compile_grammar else None
    constraint = constraint or await tools.grammar(service)
    call_id = new_id(kind)
    generation = service.generate(
        call_id, [prompt], params, 1, constraint, tools.single_call_parser
    )
    return Conversation(call_id, prompt, tools, generation)
