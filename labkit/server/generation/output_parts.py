"""The parts of a generated message: its texts and tool calls, in the order of generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.server.constraints.tool_call_parser import ParsedToolCall, ToolCallParser
from labkit.server.generation.api_generation import TokenOutput

Part = str | ParsedToolCall


def output_parts(output: TokenOutput, parser: ToolCallParser | None) -> list[Part]:
    """Return the texts and calls that an output completes.

    ``parser`` is the parser of the output's choice, or None if the choice has no tool calls.
    """
    if parser is None:
        return [output.text] if output.text else []
    return [*parser.add(output.text), *(parser.finish() if output.finish_reason else ())]


def message_parts(text: str, parser: ToolCallParser | None) -> list[Part]:
    """Return the parts of an entire message. A message without any part is one empty text."""
    parts: list[Part] = []
    for item in [text] if parser is None else [*parser.add(text), *parser.finish()]:
        if isinstance(item, str) and parts and isinstance(parts[-1], str):
            parts[-1] += item
        else:
            parts.append(item)
    return parts or [""]


def has_call(parts: Sequence[Part]) -> bool:
    """Return whether any of the parts is a tool call."""
    return any(isinstance(part, ParsedToolCall) for part in parts)


class PartEvents(Protocol):
    """An API's events for the parts of a streamed message. ``index`` counts the parts."""

    def text_start(self, index: int) -> list[bytes]:
        """Return the events at the start of a text."""

    def text_delta(self, index: int, text: str) -> list[bytes]:
        """Return the events for the next piece of a text."""

    def text_end(self, index: int, text: str, *, is_whole: bool) -> list[bytes]:
        """Return the events at the end of a text.

        ``is_whole`` is False if the maximum output length cut the text off.
        """

    def call(self, index: int, call: ParsedToolCall) -> list[bytes]:
        """Return the events of a tool call."""


class PartStream:
    """Turns the outputs of one choice into the events of its parts.

    ``parts`` are the parts that have ended.
    """

    def __init__(self, events: PartEvents, parser: ToolCallParser | None) -> None:
        self.parts: list[Part] = []
        self._events = events
        self._parser = parser
        self._text: list[str] | None = None  # the pieces of the text that has not ended

    def add(self, output: TokenOutput) -> list[bytes]:
        """Return an output's events."""
        events: list[bytes] = []
        for part in output_parts(output, self._parser):
            if isinstance(part, str):
                events += self._start_text() if self._text is None else []
                events += self._add_text(part)
            else:
                events += self._end_text(is_whole=True)
                events += self._events.call(len(self.parts), part)
                self.parts.append(part)
        return events

    def finish(self, finish_reason: str | None) -> list[bytes]:
        """Return the events at the end of the message."""
        events = [] if self.parts or self._text is not None else self._start_text()
        return events + self._end_text(is_whole=finish_reason != "length")

    def _start_text(self) -> list[bytes]:
        self._text = []
        return self._events.text_start(len(self.parts))

    def _add_text(self, text: str) -> list[bytes]:
        if self._text is not None:
            self._text.append(text)
        return self._events.text_delta(len(self.parts), text)

    def _end_text(self, *, is_whole: bool) -> list[bytes]:
        if self._text is None:
            return []
        text, index = "".join(self._text), len(self.parts)
        self.parts.append(text)
        self._text = None
        return self._events.text_end(index, text, is_whole=is_whole)
