"""Neutral values: the values at which an unsupported request field has no effect.

Clients send such fields with every request, for example ``"echo": false``. Clients of the Responses
API also leave out the ``type`` of messages in ``input``, so this module adds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

REQUEST_VALUES: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "functions": ([],),
    "include": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # in APIs without tools
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}
MESSAGE_VALUES: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "provider_specific_fields": ({},),  # LiteLLM's
}
MESSAGE_LISTS = ("messages", "input", "system", "tools")
PART_LISTS = ("content", "tool_calls")


def without_neutral_values(request: Any, known: Collection[str]) -> Any:
    """Return a decoded request without null fields and without unknown fields at neutral values.

    Messages, message parts, tool calls and tools are cleaned in the same way. Values that a user
    defines, such as JSON schemas, are not changed. ``known`` has the names of the request's fields.
    """
    if not isinstance(request, dict):
        return request
    cleaned = {
        name: value
        for name, value in request.items()
        if value is not None
        and (name in known or not _is_neutral(value, REQUEST_VALUES.get(name, ())))
    }
    for name in MESSAGE_LISTS:
        if isinstance(cleaned.get(name), list):
            cleaned[name] = [_clean_message(item) for item in cleaned[name]]
    if isinstance(cleaned.get("input"), list):
        cleaned["input"] = [_with_type(item) for item in cleaned["input"]]
    return cleaned


def _with_type(item: Any) -> Any:
    is_untyped_message = isinstance(item, dict) and "role" in item and "type" not in item
    return {"type": "message", **item} if is_untyped_message else item


def _clean_message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    cleaned = {
        name: value
        for name, value in message.items()
        if value is not None
        and not (name in MESSAGE_VALUES and _is_neutral(value, MESSAGE_VALUES[name]))
    }
    for name in PART_LISTS:
        if isinstance(cleaned.get(name), list):
            cleaned[name] = [_clean_message(part) for part in cleaned[name]]
    return cleaned


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None}
    return any(type(value) is type(item) and value == item for item in neutral)
