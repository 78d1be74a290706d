"""Tool calls: detection of the format that a model writes, and a parser for generated text.

The formats are those of ``mlx_lm.tool_parsers`` that a mark in the model's chat template names, for
example ``<tool_call>``. mlx_lm recognises two others by other means: ``kimi_k3`` and ``laguna``.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.model.isolated_model_modules import light_package
from labkit.models.tokenizer import Tokenizer
from labkit.server.constraints.grammar_compiler import JSON_STYLE

# (mark, parser). The first mark that the chat template contains decides, so specific marks precede
# general ones.
TEMPLATE_MARKS = (
    ("<function=", "qwen3_coder"),
    ('<function name="', "minicpm5"),
    ("<arg_key>", "glm47"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<start_function_call>", "function_gemma"),
    ("<longcat_tool_call>", "longcat"),
    ("<atem:function_calls>", "muse_spark"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call_start|>", "pythonic"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "json_tools"),
)
JSON_PARSER = "json_tools"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call of a function. ``arguments`` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


class ToolCallFormat:
    """The format in which a model writes tool calls.

    ``parser``: the name of a module of ``mlx_lm.tool_parsers``.
    """

    def __init__(self, parser: str) -> None:
        with light_package():
            self._module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        self.name = parser
        self.start: str = self._module.tool_call_start
        self.end: str = self._module.tool_call_end

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedToolCall]:
        """Return the calls in the text between a start and an end mark, or [] if it has none."""
        try:
            parsed = self._module.parse_tool_call(text, list(tools))
        except Exception:  # parsers raise any exception on text that is not a call
            return []
        calls = [_call(item) for item in (parsed if isinstance(parsed, list) else [parsed])]
        return [call for call in calls if call is not None]

    def grammar(self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str | None:
        """Return a Lark grammar for one call of any of the tools.

        Returns None if the model does not write calls as JSON: other formats are not enforced.
        """
        if self.name != JSON_PARSER:
            return None
        calls = [_call_schema(tool["function"]) for tool in tools]
        schema = json.dumps({"anyOf": calls, "x-guidance": JSON_STYLE})
        first, last = _terminal(self.start, tokenizer), _terminal(self.end, tokenizer)
        return f'start: {first} "\\n" call "\\n" {last}\ncall: %json {schema}\n'


def _terminal(mark: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.token_id(mark)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object", "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _call(parsed: Any) -> ParsedToolCall | None:
    """Convert one result of mlx_lm's parser, or return None if it is not a call.

    A call has a function's name. Its arguments, if it has any, are a JSON object.
    """
    if not isinstance(parsed, Mapping) or not isinstance(parsed.get("name"), str):
        return None
    name, arguments = parsed["name"], parsed.get("arguments")
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # fails if there is a lone surrogate
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(arguments, Mapping):
        return None
    return ParsedToolCall(uuid.uuid4().hex[:24], name, text)


def detect_tool_call_format(tokenizer: Tokenizer) -> ToolCallFormat | None:
    """Return a model's tool-call format.

    Returns None if the chat template does not support tools or contains no known mark.
    """
    template = tokenizer.template
    if template is None or not template.takes_tools:
        return None
    name = next((parser for mark, parser in TEMPLATE_MARKS if mark in template.source), None)
    return None if name is None else ToolCallFormat(name)


class ToolCallParser:
    """An incremental parser that separates tool calls from plain text.

    It buffers an unfinished call, and any text that may be the beginning of a start mark. Text
    between calls that is only whitespace belongs to the format and is dropped.

    With ``single_call``, the message ends with its first call, and any later text is dropped.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        single_call: bool = False,
    ) -> None:
        self._format = call_format
        self._tools = tools
        self._single_call = single_call
        self._buffer = ""
        self._inside = False
        self._whitespace = ""  # at the start of a text that has no other character yet
        self._in_text = self._has_call = False

    @property
    def has_ended(self) -> bool:
        """Whether ``single_call`` is set and the message has had its call."""
        return self._single_call and self._has_call

    def add(self, text: str) -> Iterator[str | ParsedToolCall]:
        """Add generated text and yield the plain text and calls that are now certain."""
        yield from self._without_blank_texts(self._split(text))

    def finish(self) -> Iterator[str | ParsedToolCall]:
        """End the output: yield what is still buffered, as plain text or as the last call."""
        buffered, self._buffer = self._buffer, ""
        rest = self._calls(buffered, "") if self._inside else _nonempty(buffered)
        yield from self._without_blank_texts(rest)
        if not self._has_call:
            yield from _nonempty(self._whitespace)

    def _without_blank_texts(
        self, items: Iterator[str | ParsedToolCall]
    ) -> Iterator[str | ParsedToolCall]:
        for item in items:
            if self.has_ended:
                return
            if isinstance(item, ParsedToolCall):
                self._in_text, self._has_call, self._whitespace = False, True, ""
            elif not self._in_text:
                item = self._whitespace + item
                self._in_text = not item.isspace()
                self._whitespace = "" if self._in_text else item
                if not self._in_text:
                    continue
            yield item

    def _split(self, text: str) -> Iterator[str | ParsedToolCall]:
        self._buffer += text
        while True:
            mark = self._format.end if self._inside else self._format.start
            at = self._buffer.find(mark) if mark else -1
            if at < 0:
                break
            before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            yield from self._calls(before, mark) if self._inside else _nonempty(before)
            self._inside = not self._inside
        if not self._inside:
            num_kept = _partial_mark_length(self._buffer, self._format.start)
            cut = len(self._buffer) - num_kept
            plain_text, self._buffer = self._buffer[:cut], self._buffer[cut:]
            yield from _nonempty(plain_text)

    def _calls(self, text: str, mark: str) -> Iterator[str | ParsedToolCall]:
        """Yield the calls in the text between a start and an end mark.

        If the text contains no call, yield it with its marks as plain text.
        """
        calls = self._format.parse(text, self._tools)
        yield from calls or _nonempty(f"{self._format.start}{text}{mark}")


def _nonempty(text: str) -> Iterator[str]:
    if text:
        yield text


def _partial_mark_length(text: str, mark: str) -> int:
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((count for count in lengths if mark.startswith(text[-count:])), 0)
