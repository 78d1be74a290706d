"""What a server's stream says: server-sent events, read as data that may be wrong.

Sources: the HTML standard, "Parsing an event stream"; OpenAI's API reference, "Streaming"; the
fields ``token_ids`` and ``stream_options`` as vLLM has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_ERROR_CHARACTERS = 300  # characters of what a server says of an error


class StreamError(Exception):
    """What a server said that is no answer, in one line."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """A server's own count of a request; ``cached``: prompt tokens that it found computed."""

    prompt: int
    completion: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one event says.

    ``text``: content, reasoning, and the arguments of tool calls. ``token_ids``: those sampled,
    None where the server does not tell. ``null``: the times that a null server says.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish: str | None = None
    usage: TokenUsage | None = None
    tool_call: bool = False
    refusal: str = ""
    null: Mapping[str, float] | None = None

    @property
    def empty(self) -> bool:
        """Whether it carries nothing: a role, an empty delta."""
        content = self.text or self.token_ids or self.refusal or self.tool_call
        return not content and self.finish is None and self.usage is None


DONE = StreamChunk()  # the event that ends a stream; told from others by identity


class SSEDecoder:
    """Cuts the blocks of a stream into its events' data."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is whole now."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


def parse_chunk(data: bytes) -> StreamChunk:
    """Read one event of a stream of completions or of chat.

    Raises
    ------
    StreamError
        It is no chunk, or it is an error.
    """
    if data == b"[DONE]":
        return DONE
    try:
        event = json.loads(data)
        if "error" in event and not event.get("choices"):
            raise StreamError(error_text(event))
        return _chunk_from_json(event)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise StreamError(
            f"a chunk that is none: {_shorten(data.decode(errors='replace'))}"
        ) from error


def _chunk_from_json(event: Mapping[str, Any]) -> StreamChunk:
    usage, null = _usage_from_json(event.get("usage")), event.get("null")
    if not event["choices"]:
        return StreamChunk(usage=usage)
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or []
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    texts = [choice.get("text"), thought, delta.get("content"), *map(_tool_call_text, calls)]
    ids = choice.get("token_ids")
    return StreamChunk(
        text="".join(text for text in texts if text),
        token_ids=None if ids is None else tuple(map(int, ids)),
        finish=choice.get("finish_reason"),
        usage=usage,
        tool_call=bool(calls),
        refusal=delta.get("refusal") or "",
        null=null,
    )


def _tool_call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


def _usage_from_json(said: Mapping[str, Any] | None) -> TokenUsage | None:
    if not said:
        return None
    cached = (said.get("prompt_tokens_details") or {}).get("cached_tokens")
    prompt, completion = said.get("prompt_tokens") or 0, said.get("completion_tokens") or 0
    return TokenUsage(int(prompt), int(completion), None if cached is None else int(cached))


def error_text(answer: Any) -> str:
    """Say a server's error in one line, whatever form it has."""
    if isinstance(answer, bytes):
        try:
            answer = json.loads(answer)
        except ValueError:
            return _shorten(answer.decode(errors="replace")) or "no reason given"
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return _shorten(message if isinstance(message, str) else json.dumps(message))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."
