"""Request and response types of OpenAI's Responses API. Unknown request fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from labkit.server.types.openai_types import Function, JsonObject, Labels


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text part of an input message."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text part of the model's message."""

    text: str
    annotations: list[JsonObject] = []
    logprobs: list[JsonObject] | None = None


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of the conversation.

    ``id`` and ``status`` are ignored. They are accepted because items that clients copy from
    earlier responses contain them.
    """

    id: str | None = None
    status: str | None = None


class InputMessage(InputItem, tag_field="type", tag="message", kw_only=True):
    """A message of the conversation. ``phase`` is ignored, like ``id``."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    phase: str | None = None


class InputCall(InputItem, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function by the assistant. ``arguments`` is JSON text."""

    call_id: str
    name: str
    arguments: str


class InputCallOutput(InputItem, tag_field="type", tag="function_call_output", kw_only=True):
    """The result of a function call."""

    call_id: str
    output: str | list[InputText]


class ResponseTextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The format of unconstrained text."""


class ResponseJsonFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The text must be a JSON object, of any schema."""


class ResponseSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that matches ``schema``. The schema is enforced even if ``strict`` is false."""

    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """The format of the generated text."""

    format: ResponseTextFormat | ResponseJsonFormat | ResponseSchemaFormat | None = None


class FunctionTool(Function, tag_field="type", tag="function", kw_only=True):
    """A function that the model may call."""


class FunctionChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A ``tool_choice`` that requires a call of one function."""

    name: str


class ResponsesRequest(Labels, kw_only=True):
    """The body of a ``POST /v1/responses`` request."""

    model: str
    input: str | Annotated[list[InputMessage | InputCall | InputCallOutput], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None


class OutputMessage(Struct, tag_field="type", tag="message", frozen=True):
    """A text that the model generated."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag_field="type", tag="function_call", frozen=True):
    """A call of a function that the model generated. ``arguments`` is JSON text."""

    id: str
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Struct, frozen=True):
    """The number of prompt tokens that the prefix cache held when the request started."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """The number of reasoning tokens: always 0, because the server counts them as text."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """The numbers of prompt tokens and of generated tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(Struct, frozen=True):
    """The reason that the model's message is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The response to a ``ResponsesRequest``."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    temperature: float
    top_p: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    error: None = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
