"""Request and response types of Anthropic's Messages API. Unknown request fields are errors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from labkit.server.types.openai_types import FunctionNameText, JsonObject, StopText


class CacheControl(Struct, forbid_unknown_fields=True):
    """Marks the end of a prefix to cache. Ignored: the server's config decides what is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request that may be marked for caching."""

    cache_control: CacheControl | None = None


class TextParam(Cacheable, tag_field="type", tag="text", kw_only=True):
    """A text block of a message."""

    text: str


class ToolUseParam(Cacheable, tag_field="type", tag="tool_use", kw_only=True):
    """A tool call in a message of the assistant."""

    id: str
    name: str
    input: JsonObject


class ToolResultParam(Cacheable, tag_field="type", tag="tool_result", kw_only=True):
    """The result of a tool call, in a message of the user."""

    tool_use_id: str
    content: str | list[TextParam] | None = None
    is_error: bool | None = None


class MessageParam(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[TextParam | ToolUseParam | ToolResultParam]


class ToolParam(Cacheable, kw_only=True):
    """A function that the model may call. ``input_schema`` is a JSON schema of its arguments."""

    name: FunctionNameText
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class AutoChoice(Struct, tag_field="type", tag="auto", kw_only=True, forbid_unknown_fields=True):
    """The ``tool_choice`` that leaves it to the model whether to call a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(AutoChoice, tag="any", kw_only=True):
    """The ``tool_choice`` that requires a call."""


class ToolNameChoice(AutoChoice, tag="tool", kw_only=True):
    """The ``tool_choice`` that requires a call of one tool."""

    name: str


class NoneChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    """The ``tool_choice`` that allows no call."""


class UserMetadata(Struct, forbid_unknown_fields=True):
    """An identifier of the user, which the server ignores."""

    user_id: str | None = None


class JsonOutputFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The output format for JSON that matches ``schema``."""

    schema: JsonObject


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The format of the message. The effort ``high`` is the API's default and has no effect."""

    format: JsonOutputFormat | None = None
    effort: Literal["high"] | None = None


class CountTokensRequest(Cacheable, kw_only=True):
    """The body of a ``POST /v1/messages/count_tokens`` request.

    A ``POST /v1/messages`` request with these fields has the same prompt.
    """

    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextParam] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=128)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolNameChoice | NoneChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of a ``POST /v1/messages`` request."""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class TokenCount(Struct, frozen=True):
    """The response to a ``CountTokensRequest``: the number of the prompt's tokens."""

    input_tokens: int


class TextBlock(Struct, tag_field="type", tag="text", frozen=True):
    """A text block of the model's message."""

    text: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", frozen=True):
    """A tool call of the model's message. ``input`` is a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


class MessageUsage(Struct, frozen=True):
    """The numbers of prompt tokens and of generated tokens.

    As in Anthropic's API, ``input_tokens`` does not count the prompt tokens that were read from
    the cache.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(Struct, frozen=True):
    """The response to a ``MessagesRequest``."""

    id: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageErrorDetail(Struct, frozen=True):
    """An error's type (for example ``rate_limit_error``) and message."""

    type: str
    message: str


class MessageError(Struct, frozen=True):
    """The JSON body of an error response (any status other than 200)."""

    error: MessageErrorDetail
    type: Literal["error"] = "error"
