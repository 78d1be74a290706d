"""Functions that a model may call: how its template wants them written, and finding them again.

What a call looks like in text is mlx_lm's knowledge (``mlx_lm.tool_parsers``); which of its
parsers a model needs shows in the marks that its chat template writes.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.module_rebinding import light_package
from labkit.models.tokenizer import Tokenizer
from labkit.server.structured_output import STYLE

# What only this parser's templates write, the most particular first; JSON between two marks last.
MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm47"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<start_function_call>", "function_gemma"),
    ("<longcat_tool_call>", "longcat"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call_start|>", "pythonic"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "json_tools"),
)
JSON = "json_tools"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A function that the model calls; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class ToolCallFormat:
    """How a model writes calls.

    Parameters
    ----------
    parser
        The name of mlx_lm's parser.
    """

    def __init__(self, parser: str) -> None:
        with light_package():
            self._module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        self.name = parser
        self.start: str = self._module.tool_call_start
        self.end: str = self._module.tool_call_end

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedToolCall]:
        """Return the calls between two marks; none where the text is not as it should be."""
        try:
            found = self._module.parse_tool_call(text, list(tools))
        except Exception:  # whatever a parser trips over: the model wrote something else
            return []
        calls = [_call(item) for item in (found if isinstance(found, list) else [found])]
        return [call for call in calls if call is not None]

    def grammar(self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str | None:
        """Return the Lark grammar of one call of these tools; None: only JSON has one."""
        if self.name != JSON:
            return None
        calls = [_call_schema(tool["function"]) for tool in tools]
        schema = json.dumps({"anyOf": calls, "x-guidance": STYLE})
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


def _call(found: Any) -> ParsedToolCall | None:
    """Return a parser's result as a call; None where it is none."""
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ParsedToolCall(f"call_{uuid.uuid4().hex[:24]}", found["name"], text)


def call_format(tokenizer: Tokenizer) -> ToolCallFormat | None:
    """Return how a model writes calls; None: its template has no tools, or marks not known here."""
    template = tokenizer.template
    if template is None or not template.takes_tools:
        return None
    found = next((parser for mark, parser in MARKS if mark in template.source), None)
    return None if found is None else ToolCallFormat(found)


class ToolCallParser:
    """Takes a text as it comes; tells calls from what is said beside them.

    What may be the beginning of a mark is held back, and so is a call until it is whole.
    """

    def __init__(self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form = form
        self._tools = tools
        self._held = ""
        self._inside = False

    def add(self, text: str) -> Iterator[str | ParsedToolCall]:
        """Take more text; yield what is certain."""
        self._held += text
        while True:
            mark = self._form.end if self._inside else self._form.start
            at = self._held.find(mark) if mark else -1
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            yield from self._calls(before, mark) if self._inside else _said(before)
            self._inside = not self._inside
        if not self._inside:
            keep = _begun(self._held, self._form.start)
            shown, self._held = (
                self._held[: len(self._held) - keep],
                self._held[len(self._held) - keep :],
            )
            yield from _said(shown)

    def finish(self) -> Iterator[str | ParsedToolCall]:
        """Yield what is left: a call whose end mark did not come, or plain text."""
        held, self._held = self._held, ""
        if self._inside:
            yield from self._calls(held, "")
        else:
            yield from _said(held)

    def _calls(self, text: str, mark: str) -> Iterator[str | ParsedToolCall]:
        """Yield the calls; what is none is said as it was written."""
        calls = self._form.parse(text, self._tools)
        yield from calls or _said(f"{self._form.start}{text}{mark}")


def _said(text: str) -> Iterator[str]:
    if text:
        yield text


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((count for count in lengths if mark.startswith(text[-count:])), 0)
