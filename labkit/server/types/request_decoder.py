"""Decoding of request bodies, with errors that name the field and what it must be."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from labkit.server.types.api_error import ApiError, invalid
from labkit.server.types.neutral_values import REQUEST_VALUES, without_neutral_values

T = TypeVar("T", bound=msgspec.Struct)
FUNCTION_TYPES = ("function", "custom")  # a tool's type; the Messages API has "custom"
# Objects and arrays of a body in which unknown fields may be tolerated, while the event loop waits.
MAX_CLEANED = 1 << 17
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character
MAX_VALUE_CHARACTERS = 100  # of an invalid value that a message repeats


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
    """Return the values that a field of type ``Literal`` may have, in the order of its definition.

    ``request_type`` is a ``msgspec.Struct``. ``path`` is a field's path in a message of msgspec,
    for example ``messages[0].role``.
    """
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
    """Return the types of the part of ``whole`` that one step of a path selects.

    ``step`` is the name of an object's field, or an index such as ``[0]`` for the items of an
    array. Returns [] if there is no such part.
    """
    if isinstance(whole, inspect.ListType):
        return [whole.item_type]
    if isinstance(whole, inspect.StructType):
        if step == whole.tag_field:
            return [inspect.LiteralType((whole.tag,))]
        return [field.type for field in whole.fields if field.encode_name == step]
    return []
