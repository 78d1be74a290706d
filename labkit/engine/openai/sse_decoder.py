"""Decode a server's event stream into chunks, without trusting the stream to be well formed.

Sources: the HTML standard, "Parsing an event stream"; OpenAI's API reference, "Streaming"; vLLM for
the fields ``token_ids`` and ``stream_options``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_ERROR_CHARACTERS = 300  # a server's longer error message is cut
# What a chunk of another shape than OpenAI's raises when it is read.
UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class StreamError(Exception):
    """The stream contains an error message or an invalid chunk. The message is one line."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a server. ``cached``: of the prompt, in the prefix cache (None: unknown)."""

    prompt: int
    completion: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One chunk of a streamed response.

    ``text``: content, reasoning, and names and arguments of tool calls. ``token_ids``: the sampled
    ids, or None if the server sends no ids. ``finish``: the finish reason. ``null_times``: the
    times that labkit's null server adds.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish: str | None = None
    usage: TokenUsage | None = None
    tool_call: bool = False
    refusal: str = ""
    null_times: Mapping[str, float] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the chunk has no content, finish reason or usage (for example, only a role)."""
        content = self.text or self.token_ids or self.refusal or self.tool_call
        return not content and self.finish is None and self.usage is None


DONE = StreamChunk()  # ``[DONE]``, the end of a stream; compare with ``is``


class SSEDecoder:
    """An incremental decoder that splits a stream's bytes into the data of its events."""

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._event_lines: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the data of every event that they complete."""
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._event_lines.append(line[5:].removeprefix(b" "))
            elif not line and self._event_lines:
                yield b"\n".join(self._event_lines)
                self._event_lines = []


def may_have_content(data: bytes) -> bool:
    """Return whether the bytes of a read may hold more than what only keeps a connection open.

    Comments, events without data and empty chunks do. A line that the read has cut may be content.
    """
    for line in map(bytes.strip, data.split(b"\n")):
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            continue
        try:
            chunk = parse_chunk(line.removeprefix(b"data:").strip())
        except StreamError:
            return True
        if chunk is DONE or not chunk.is_empty:
            return True
    return False


def parse_chunk(data: bytes) -> StreamChunk:
    """Parse the data of one event of the completions or the chat API.

    Returns ``DONE`` for ``[DONE]``. Raises ``StreamError`` if the data is an error message or not a
    valid chunk.
    """
    if data == b"[DONE]":
        return DONE
    try:
        event = json.loads(data)
        if "error" in event and not event.get("choices"):
            raise StreamError(error_text(event))
        return _chunk_from_json(event)
    except UNEXPECTED as error:
        raise StreamError(f"invalid chunk: {_shorten(data.decode(errors='replace'))}") from error


def _chunk_from_json(event: Mapping[str, Any]) -> StreamChunk:
    usage = parse_usage(event.get("usage"))
    choices = event.get("choices") if usage else event["choices"]
    if not choices:  # the last chunk: OpenAI's has an empty list, others' have null or no list
        return StreamChunk(usage=usage)
    choice = choices[0]
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or []
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    texts = [choice.get("text"), reasoning, delta.get("content"), *map(_tool_call_text, calls)]
    ids = choice.get("token_ids")
    return StreamChunk(
        text="".join(text for text in texts if text),
        token_ids=None if ids is None else tuple(map(int, ids)),
        finish=choice.get("finish_reason"),
        usage=usage,
        tool_call=bool(calls),
        refusal=delta.get("refusal") or "",
        null_times=event.get("null"),
    )


def _tool_call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


def parse_usage(usage: Mapping[str, Any] | None) -> TokenUsage | None:
    """Return a response's ``usage``, or None if it has none."""
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return TokenUsage(int(prompt), int(completion), None if cached is None else int(cached))


def error_text(body: Any) -> str:
    """Return the error message in a body, bytes or JSON of any shape, as one limited line."""
    if isinstance(body, bytes):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            return _shorten(body.decode(errors="replace")) or "no reason given"
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return _shorten(message if isinstance(message, str) else json.dumps(message))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."
