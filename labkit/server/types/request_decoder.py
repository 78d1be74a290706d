"""Decoding of request bodies, with errors that name the field and what it must be.

Clients send fields that this server does not support with every request, for example
``"echo": false``. They are accepted at their neutral values, at which they have no effect. Clients
of the Responses API also leave out the ``type`` of messages in ``input``, so it is added.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from labkit.server.types.api_error import ApiError, invalid

T = TypeVar("T", bound=msgspec.Struct)
FUNCTION_TYPES = ("function", "custom")  # a tool's type; the Messages API has "custom"
# Objects and arrays of a body in which unknown fields may be tolerated, while the event loop waits.
MAX_CLEANED = 1 << 17
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character
MAX_VALUE_CHARACTERS = 100  # of an invalid value that a message repeats
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
    "priority": (0,),
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


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a request's body. Unknown fields are accepted if their values have no effect.

    Raises ``ApiError`` if the body is not valid JSON or does not match the type. The error's
    ``param`` is the path of the invalid field, for example ``messages[0].role``, or None if it is
    not known.
    """
    try:
        with _no_garbage_collection():
            return _decode(decoder, body)
    except msgspec.ValidationError as error:
        raise _validation_error(decoder.type, str(error)) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = "it may have a lone surrogate" if SURROGATE.search(body) else str(error)
        raise invalid(f"the body is not valid JSON: {text}") from None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from scanning a million new lists again and again, with the GIL held."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if body.count(b"{") + body.count(b"[") > MAX_CLEANED:
            raise
        try:
            request = msgspec.json.decode(body)
        except msgspec.ValidationError:  # a number is out of range; this error does not say where
            raise error from None
    _check_tool_types(request)
    cleaned = without_neutral_values(request, decoder.type)
    return decoder.decode(msgspec.json.encode(cleaned))


def _check_tool_types(request: Any) -> None:
    """Raise ``ApiError`` if a tool of the request is not a function."""
    tools = request.get("tools") if isinstance(request, dict) else None
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in FUNCTION_TYPES:
            raise invalid(
                f"tools[{index}]: only functions are supported, not built-in tools such as "
                "web_search",
                "tools",
            )


def _validation_error(request_type: Any, text: str) -> ApiError:
    """Return the error for a message of msgspec, such as "Expected `int`, got `str` - at `$.n`"."""
    problem, _, path = text.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        name = _join(path, unknown.group(1))
        return invalid(f"{name}: {_unsupported(name)}", name, "unknown_parameter")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        name = _join(path, missing.group(1))
        return invalid(f"{name}: required, but missing", name)
    if wrong := re.fullmatch(r"Invalid (?:enum )?value (.*)", problem, re.DOTALL):
        value, allowed = wrong.group(1), _allowed_values(request_type, path)
        if len(value) > MAX_VALUE_CHARACTERS:
            value = f"{value[:MAX_VALUE_CHARACTERS]}..."
        return invalid(f"{path}={value}: must be {_one_of([repr(v) for v in allowed])}", path)
    return invalid(f"{path or 'the body'}: {problem[:1].lower()}{problem[1:]}", path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unsupported(name: str) -> str:
    values = REQUEST_VALUES.get(name)
    if values is None:
        return "this server has no such field; leave it out"
    return f"this server supports only {_one_of([json.dumps(v) for v in values])}; leave it out"


def _one_of(texts: Sequence[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last


def _allowed_values(request_type: Any, path: str) -> list[Any]:
    """Return the values of the ``Literal`` at a path such as ``messages[0].role``, in order."""
    types = list(_alternatives([inspect.type_info(request_type)]))
    for step in re.findall(r"\[.*?\]|[^.\[\]]+", path):
        types = list(_alternatives(part for each in types for part in _parts(each, step)))
    return [v for each in types if isinstance(each, inspect.LiteralType) for v in each.values]


def _alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for each in types:
        if isinstance(each, inspect.UnionType):
            yield from _alternatives(each.types)
        else:
            yield each.type if isinstance(each, inspect.Metadata) else each


def _parts(whole: inspect.Type, step: str) -> list[inspect.Type]:
    """Return the types of the part that a step of a path selects: a field, or an index ``[0]``."""
    if isinstance(whole, inspect.ListType):
        return [whole.item_type]
    if isinstance(whole, inspect.StructType):
        if step == whole.tag_field:
            return [inspect.LiteralType((whole.tag,))]
        return [field.type for field in whole.fields if field.encode_name == step]
    return []


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
