"""One request's answer as a server streams it: what is counted, and what becomes an event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit.engine.engine_protocol import NO_TOKEN, Counters, FinishReason, StreamEvent
from labkit.engine.openai.sse_decoder import DONE, SSEDecoder, StreamChunk, TokenUsage, parse_chunk
from labkit.engine.request import Request
from labkit.models.detokenizer import Detokenizer

COUNTED_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass(slots=True)
class StreamedResponse:
    """What has come for one request.

    ``chunks``: reads that brought content; ``said``: events that did.
    """

    request: Request
    text: str = ""
    ids: list[int] = field(default_factory=list)
    has_token_ids: bool = False
    chunks: int = 0
    said: int = 0
    finish: str | None = None
    usage: TokenUsage | None = None
    ended: bool = False  # by [DONE]
    refusal: str = ""
    null_timings: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # got, sent, received
    _events: SSEDecoder = field(default_factory=SSEDecoder)

    def take(self, block: bytes, at: float, counters: Counters) -> Iterator[StreamEvent]:
        """Read what came at once, at ``at``; yield its tokens, or its text where it names none.

        Events that are read together were there together: they are one chunk.

        Raises
        ------
        StreamError
            It is no answer.
        """
        content: list[StreamChunk] = []
        for data in self._events.feed(block):
            said = parse_chunk(data)
            if said is DONE:
                self.ended = True
                continue
            self._note(said, at, counters)
            if said.text or said.token_ids:
                content.append(said)
        if content:
            self.chunks += 1
            self.said += len(content)
            ids = sum(len(said.token_ids or ()) for said in content)
            counters.add("stream.chunks")
            counters.add("stream.bundled", len(content) > 1 or ids > 1)
        for said in content:
            if said.token_ids:
                yield from (self._event(at, token=token) for token in said.token_ids)
            elif not self.has_token_ids:
                yield self._event(at, text=said.text)

    def _note(self, said: StreamChunk, at: float, counters: Counters) -> None:
        self.text += said.text
        self.finish = said.finish or self.finish
        self.usage = said.usage or self.usage
        self.refusal += said.refusal
        if said.token_ids is not None:
            self.has_token_ids = True
            self.ids += said.token_ids
        if said.null is not None:
            self.null_timings.append((said.null["got"], said.null["sent"], at))
        if said.empty:
            counters.add("stream.empty")
        if said.tool_call:
            counters.add("stream.tool_calls")
        if said.refusal:
            counters.add("stream.refusals")

    def _event(self, at: float, **what: Any) -> StreamEvent:
        return StreamEvent(
            self.request.request_id, what.pop("token", NO_TOKEN), None, received=at, **what
        )

    def finish_event(self, at: float, spelling: Detokenizer, counters: Counters) -> StreamEvent:
        """Return the last event of a stream that has ended: served, or failed and why."""
        word = self.finish if self.finish in COUNTED_FINISH_REASONS else "other"
        if self.finish is not None:
            counters.add(f"finish.{word}")
        why = self._failure()
        if why is not None:
            return error_event(self.request, at, why)
        count = self.tokens(spelling)
        full = count == self.request.params.max_tokens
        finish: FinishReason = "length" if full or self.finish == "length" else "stop"
        return StreamEvent(
            self.request.request_id,
            NO_TOKEN,
            finish,
            received=at,
            counted=count,
            whole=None if self.has_token_ids else spelling.plain(self.text),
        )

    def tokens(self, spelling: Detokenizer) -> int:
        """Return how many tokens it has: by its ids, else by the server, else by the tokenizer."""
        if self.has_token_ids:
            return len(self.ids)
        return self.usage.completion if self.usage else spelling.count(self.text)

    def _failure(self) -> str | None:
        """Say why an answer is none, or not the one that was asked for."""
        params = self.request.params
        if self.refusal:
            return f"the server refused: {' '.join(self.refusal.split())}"
        if self.finish is None:
            return "its stream broke off" if not self.ended else "no finish reason came"
        if self.finish not in ("stop", "length", "tool_calls"):
            return f"finish reason {self.finish}"
        if not self.chunks:
            return f"no token came (finish reason {self.finish})"
        count = (
            len(self.ids) if self.has_token_ids else self.usage.completion if self.usage else None
        )
        if count is None:
            return None
        if count > params.max_tokens:
            return f"{count} tokens, {params.max_tokens} were asked for"
        if count < params.max_tokens and (params.ignore_eos or self.finish == "length"):
            wanted = f"{count} of {params.max_tokens} tokens"
            return f"it ended early: {wanted}, finish reason {self.finish}"
        return None


def error_event(request: Request, at: float, why: str) -> StreamEvent:
    """Return the event of a request that was not served."""
    said = f"request {request.request_id}: {why}"
    return StreamEvent(request.request_id, NO_TOKEN, "error", error=said, received=at)
