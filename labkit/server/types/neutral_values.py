"""Neutral values: the values at which an unsupported request field has no effect.

Clients send such fields with every request, for example ``"echo": false``. Clients of the Responses
API also leave out the ``type`` of messages in ``input``, so this module adds it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from msgspec import inspect

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
# Of fields of objects inside a request: messages, their parts, tools, options.
NESTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "include_obfuscation": (False,),  # of stream_options
    "provider_specific_fields": ({},),  # LiteLLM's
}
# The names of an object's fields, and of the fields of the objects in each of them. Empty for a
# value without objects, or one that a user defines, such as a JSON schema.
Fields = Mapping[str, Any]


def without_neutral_values(request: Any, request_type: Any) -> Any:
    """Return a decoded request without null fields and without unknown fields at neutral values.

    The objects in its fields are cleaned in the same way. Values that a user defines, such as JSON
    schemas, are not changed. ``request_type`` is the ``msgspec.Struct`` of the request.
    """
    if not isinstance(request, dict):
        return request
    known = _request_fields(request_type)
    neutral = {name: values for name, values in REQUEST_VALUES.items() if name not in known}
    cleaned = _cleaned(request, known, neutral)
    if isinstance(cleaned.get("input"), list):
        cleaned["input"] = [_with_type(item) for item in cleaned["input"]]
    return cleaned


def _with_type(item: Any) -> Any:
    is_untyped_message = isinstance(item, dict) and "role" in item and "type" not in item
    return {"type": "message", **item} if is_untyped_message else item


@functools.cache
def _request_fields(request_type: Any) -> Fields:
    return _fields(inspect.type_info(request_type))


def _fields(kind: inspect.Type) -> Fields:
    """Return the fields of the objects in a value. Of a union, those of all its members."""
    if isinstance(kind, inspect.Metadata):
        return _fields(kind.type)
    if isinstance(kind, inspect.ListType):
        return _fields(kind.item_type)
    if isinstance(kind, inspect.UnionType):
        return functools.reduce(_merged, map(_fields, kind.types))
    if isinstance(kind, inspect.StructType):
        return {field.encode_name: _fields(field.type) for field in kind.fields}
    return {}


def _merged(one: Fields, other: Fields) -> Fields:
    return {n: _merged(one.get(n, {}), other.get(n, {})) for n in one.keys() | other.keys()}


def _cleaned(value: Any, known: Fields, neutral: Mapping[str, tuple[object, ...]]) -> Any:
    """Return an object, or a list of objects, without null and neutral fields."""
    if isinstance(value, list):
        return [_cleaned(item, known, neutral) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _cleaned(item, known[name], NESTED_VALUES) if known.get(name) else item
        for name, item in value.items()
        if item is not None and not (name in neutral and _is_neutral(item, neutral[name]))
    }


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None}
    return any(type(value) is type(item) and value == item for item in neutral)
