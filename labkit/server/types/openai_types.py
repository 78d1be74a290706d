"""Request and response types of OpenAI's completions and chat APIs.

Unknown fields in a request are errors. Besides OpenAI's fields, requests may contain these of vLLM:
``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``,
``return_token_ids``, ``continuous_usage_stats``, ``min_tokens``, ``structured_outputs``,
``chat_template_kwargs``, ``add_generation_prompt``, ``continue_final_message``,
``prompt_logprobs`` and ``priority``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
JsonObject = dict[str, Any]
FunctionNameText = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
StopText = Annotated[str, Meta(min_length=1)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Whether a stream reports usage at its end, in every chunk, or not at all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """A constraint on the output. Exactly one of the fields must be set.

    ``json``: a JSON schema, as an object or as text. ``regex``: a regular expression that matches
    the entire output. ``choice``: a list of possible outputs. ``grammar``: a grammar in
    llguidance's Lark syntax. ``json_object``: true for a JSON object of any shape.
    """

    json: JsonObject | str | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None


class Labels(Struct, kw_only=True, forbid_unknown_fields=True):
    """Request fields that label a request or its user. The server ignores them."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None


class Sampling(Labels, kw_only=True):
    """The request fields that the completions API and the chat API share."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | Annotated[list[StopText], Meta(max_length=16)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    priority: Int64 | None = None


class CompletionRequest(Sampling, kw_only=True):
    """The body of a ``POST /v1/completions`` request.

    ``max_tokens`` may be 0 if the response has the prompt (``echo``) or its log probabilities.
    """

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of a message. Other kinds of parts are not supported."""

    text: str


class FunctionCall(Struct, forbid_unknown_fields=True):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A tool call in a message of the assistant."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class Function(Struct, forbid_unknown_fields=True):
    """A function that the model may call. ``parameters`` is a JSON schema of its arguments."""

    name: FunctionNameText
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    """The name of the function that the model must call."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """A ``tool_choice`` that requires a call of one function."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The response format for unconstrained text."""


class JsonFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The response format for any JSON object."""


class NamedSchema(Struct, forbid_unknown_fields=True):
    """A named JSON schema. The schema is always enforced, even if ``strict`` is false."""

    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The response format for JSON that matches a schema."""

    json_schema: NamedSchema


class ChatRequest(Sampling, kw_only=True):
    """The body of a ``POST /v1/chat/completions`` request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class PromptTokensDetails(Struct, frozen=True):
    """The number of prompt tokens that the prefix cache held when the request started."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """The numbers of prompt tokens, each prompt once, and of generated tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextLogprobs(Struct, frozen=True):
    """Natural log-probabilities of a completion's tokens.

    ``text_offset`` is the position of each token in the completion's text, in characters. The first
    token of a prompt (``echo``) has null instead of log-probabilities.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A token's log-probability at a position of the prompt, as in vLLM's ``prompt_logprobs``.

    ``rank`` is 1 for the likeliest token. It is null if the prompt token is not among the top
    tokens that the request asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# One entry per prompt token, by token id. The first token has none.
PromptLogprobObjects = list[dict[int, PromptLogprob] | None]


class TextChoice(Struct, frozen=True):
    """A completion or, in a stream, the next part of a completion."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobObjects | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """The response to a ``CompletionRequest``, and every object of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct, frozen=True):
    """A token and its log-probability.

    ``bytes`` is the token's text in UTF-8, or null if the token is not valid UTF-8 by itself.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A sampled token with its log-probability, and the most likely tokens at the same position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Natural log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(Struct, frozen=True):
    """The message that the model generated."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """A generated message and its finish reason."""

    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    """The response to a ``ChatRequest``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobObjects | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True):
    """The next part of a tool call's function: first the name, then the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """The next part of a tool call. Only a call's first part contains ``id`` and ``type``."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """The next part of a message. Only a message's first part contains the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """The next part of one choice, as a stream's chunk contains it."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    """A chunk of a chat stream. The chunk that reports the final usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, frozen=True):
    """The served model. As in vLLM, ``max_model_len`` limits prompt plus output tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, frozen=True):
    """The body of the response to ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]
