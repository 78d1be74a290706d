"""Tool calls: detection of the format that a model writes, and a parser for generated text.

The formats are those of ``mlx_lm.tool_parsers`` that a mark in the model's chat template names, for
example ``<tool_call>``. mlx_lm recognises two others by other means: ``kimi_k3`` and ``laguna``.
"""

from __future__ import annotations

import importlib
import json
import re
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
# The ids of calls in formats whose chat templates write them into the prompt. Mistral's templates
# refuse any others. Kimi's models generate the ids themselves, counting the calls.
TEMPLATE_IDS = {"mistral": "[a-zA-Z0-9]{9}", "kimi_k2": r"[a-zA-Z0-9_.-]+:[0-9]+"}


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call of a function. ``arguments`` is a JSON object, as text.

    ``is_template_id``: the model's chat template writes ``id`` into the prompt.
    """

    id: str
    name: str
    arguments: str
    is_template_id: bool = False

    def prefixed_id(self, prefix: str) -> str:
        """Return the id after an API's prefix, or alone if the chat template needs it so."""
        return self.id if self.is_template_id else f"{prefix}_{self.id}"


class ToolCallFormat:
    """The format of a model's tool calls: a module ``parser`` of ``mlx_lm.tool_parsers``."""

    def __init__(self, parser: str) -> None:
        with light_package():
            self._module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        self.name = parser
        self.start: str = self._module.tool_call_start
        self.end: str = self._module.tool_call_end
        # Whether a call that lacks its end mark is whole if it can be parsed: JSON that was cut off
        # cannot be, but other formats would give a call with fewer arguments.
        self.shows_its_end = not self.end or parser == JSON_PARSER

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedToolCall]:
        """Return the calls in the text between two marks, or [] if one calls none of the tools."""
        try:
            parsed = self._module.parse_tool_call(text, list(tools))
        except Exception:  # parsers raise any exception on text that is not a call
            return []
        items = parsed if isinstance(parsed, list) else [parsed]
        names = {tool["function"]["name"] for tool in tools}
        calls = [call for item in items if (call := self._call(item)) and call.name in names]
        return calls if len(calls) == len(items) else []

    def _call(self, parsed: Any) -> ParsedToolCall | None:
        """Convert one result of mlx_lm's parser, or return None if it is not a call."""
        if not isinstance(parsed, Mapping) or not isinstance(parsed.get("name"), str):
            return None
        arguments = _arguments_text(parsed.get("arguments"))
        if arguments is None:
            return None
        pattern, given = TEMPLATE_IDS.get(self.name), str(parsed.get("id"))
        if pattern is None:
            return ParsedToolCall(uuid.uuid4().hex[:24], parsed["name"], arguments)
        call_id = given if re.fullmatch(pattern, given) else uuid.uuid4().hex[:9]
        return ParsedToolCall(call_id, parsed["name"], arguments, is_template_id=True)

    def grammar(self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str | None:
        """Return a Lark grammar for one call of any of the tools.

        The schema of a function's arguments is a document of its own, because its references
        (``$ref``) begin at its root. Returns None if the model does not write calls as JSON: other
        formats are not enforced.
        """
        if self.name != JSON_PARSER:
            return None
        first, last = _terminal(self.start, tokenizer), _terminal(self.end, tokenizer)
        calls = " | ".join(f"call_{index}" for index in range(len(tools)))
        rules = [f'start: {first} "\\n" ({calls}) "\\n" {last}']
        for index, tool in enumerate(tools):
            function = tool["function"]
            begin = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
            schema = function.get("parameters") or {"type": "object", "additionalProperties": False}
            schema_text = json.dumps({**schema, "x-guidance": JSON_STYLE})
            rules.append(f'call_{index}: {begin} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: %json {schema_text}")
        return "\n".join([*rules, ""])


def _terminal(mark: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.token_id(mark)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _arguments_text(arguments: Any) -> str | None:
    """Return parsed arguments as the JSON text of an object, or None if they are not an object."""
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails if there is a lone surrogate
    except (TypeError, ValueError, RecursionError):
        return None
    return text if isinstance(arguments, Mapping) else None


def detect_tool_call_format(tokenizer: Tokenizer) -> ToolCallFormat | None:
    """Return a model's tool-call format, or None if its chat template names no known one."""
    template = tokenizer.template
    if template is None or not template.takes_tools:
        return None
    name = next((parser for mark, parser in TEMPLATE_MARKS if mark in template.source), None)
    return None if name is None else ToolCallFormat(name)


class ToolCallParser:
    """An incremental parser that separates tool calls from plain text.

    It buffers an unfinished call, and any text that may be the beginning of a start mark. Text
    between calls that is only whitespace belongs to the format and is dropped.

    With ``single_call``, the message ends with its first call, and any later text is dropped. A
    format without an end mark (Mistral's) has no calls before the end of the output.
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
        """End the output: yield what is buffered. A call that may be cut off is plain text."""
        buffered, self._buffer = self._buffer, ""
        if self._inside and self._format.shows_its_end:
            rest = self._calls(buffered, "")
        else:
            rest = _nonempty(f"{self._format.start if self._inside else ''}{buffered}")
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
        """Yield the calls in a text between two marks or, if there are none, the whole text."""
        calls = self._format.parse(text, self._tools)
        yield from calls or _nonempty(f"{self._format.start}{text}{mark}")


def _nonempty(text: str) -> Iterator[str]:
    if text:
        yield text


def _partial_mark_length(text: str, mark: str) -> int:
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((count for count in lengths if mark.startswith(text[-count:])), 0)
