"""One request's streamed response: its text or token ids, its timing, and its events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labkit.engine.engine_protocol import NO_TOKEN, Counters, FinishReason, StreamEvent
from labkit.engine.openai.sse_decoder import DONE, SSEDecoder, StreamChunk, TokenUsage, parse_chunk
from labkit.engine.request import Request
from labkit.models.tokenizer import Detokenizer

COUNTED_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")


class NullChunkTimes(NamedTuple):
    """The times of a null server's chunk, the last one the client's, on ``time.perf_counter``."""

    request_received: float
    chunk_sent: float
    chunk_received: float


@dataclass(slots=True)
class StreamedResponse:
    """The part of one response that has arrived so far.

    ``num_reads``: reads that returned content. ``num_chunks``: chunks with content.
    ``num_first``: token ids or, without ids, chunks that the first such read returned.
    ``finish``: the server's finish reason. ``refusal``: text of a model's refusal.
    """

    request: Request
    text: str = ""
    ids: list[int] = field(default_factory=list)
    has_token_ids: bool = False
    num_reads: int = 0
    num_chunks: int = 0
    num_first: int = 0
    finish: str | None = None
    usage: TokenUsage | None = None
    ended: bool = False  # whether [DONE] has arrived
    refusal: str = ""
    null_timings: list[NullChunkTimes] = field(default_factory=list)
    _decoder: SSEDecoder = field(default_factory=SSEDecoder)

    def feed(self, data: bytes, at: float, counters: Counters) -> Iterator[StreamEvent]:
        """Parse the bytes of one read at time ``at``, and yield their events.

        Yields one event per token id, or one per chunk of text if the server sends no ids. Chunks
        that arrive in one read count as one in ``stream.chunks``. Raises ``StreamError`` if the
        bytes contain an error message or an invalid chunk.
        """
        content: list[StreamChunk] = []
        for event_data in self._decoder.feed(data):
            chunk = parse_chunk(event_data)
            if chunk is DONE:
                self.ended = True
                continue
            self._add(chunk, at, counters)
            if chunk.text or chunk.token_ids:
                content.append(chunk)
        if content:
            self.num_reads += 1
            self.num_chunks += len(content)
            num_ids = sum(len(chunk.token_ids or ()) for chunk in content)
            self.num_first = self.num_first or num_ids or len(content)
            counters.add("stream.chunks")
            counters.add("stream.bundled", len(content) > 1 or num_ids > 1)
        for chunk in content:
            if chunk.token_ids:
                yield from (self._event(at, token=token) for token in chunk.token_ids)
            elif not self.has_token_ids:
                yield self._event(at, text=chunk.text)

    def _add(self, chunk: StreamChunk, at: float, counters: Counters) -> None:
        self.text += chunk.text
        self.finish = chunk.finish or self.finish
        self.usage = chunk.usage or self.usage
        self.refusal += chunk.refusal
        if chunk.token_ids is not None:
            self.has_token_ids = True
            self.ids += chunk.token_ids
        if chunk.null_times is not None:
            times = NullChunkTimes(chunk.null_times["got"], chunk.null_times["sent"], at)
            self.null_timings.append(times)
        if chunk.is_empty:
            counters.add("stream.empty")
        if chunk.tool_call:
            counters.add("stream.tool_calls")
        if chunk.refusal:
            counters.add("stream.refusals")

    def _event(self, at: float, **content: Any) -> StreamEvent:
        token = content.pop("token", NO_TOKEN)
        return StreamEvent(self.request.request_id, token, None, received=at, **content)

    def final_event(self, at: float, detokenizer: Detokenizer, counters: Counters) -> StreamEvent:
        """Return the event that finishes the request, or its error, of a stream ended at ``at``."""
        if self.finish is not None:
            name = self.finish if self.finish in COUNTED_FINISH_REASONS else "other"
            counters.add(f"finish.{name}")
        reason = self._failure_reason()
        if reason is not None:
            return error_event(self.request, at, reason)
        count = self.num_tokens(detokenizer)
        is_full = count == self.request.params.max_tokens
        finish: FinishReason = "length" if is_full or self.finish == "length" else "stop"
        return StreamEvent(
            self.request.request_id,
            NO_TOKEN,
            finish,
            received=at,
            counted=count,
            first_chunk=self.num_first if self._is_one_token_per_chunk(count) else 1,
            untimed_tokens=self._num_untimed_tokens(count),
            whole=None if self.has_token_ids else detokenizer.normalize(self.text),
        )

    @property
    def _server_count(self) -> int | None:
        """The server's own number of output tokens, or None. Some servers report 0 for a text."""
        return (self.usage.completion or None) if self.usage else None

    @property
    def counted_by(self) -> str:
        """The best source of the number of tokens that the stream has, which ``num_tokens`` uses.

        It is ``token ids``, else ``usage`` (the server's), else ``tokenizer``, whose count of the
        text may differ widely from the tokens that were generated.
        """
        return "token ids" if self.has_token_ids else "usage" if self._server_count else "tokenizer"

    def num_tokens(self, detokenizer: Detokenizer) -> int:
        """Return the number of output tokens; see ``counted_by``."""
        if self.has_token_ids:
            return len(self.ids)
        return self._server_count or detokenizer.count_tokens(self.text)

    def _is_one_token_per_chunk(self, count: int) -> bool:
        """Return whether a chunk has ids or counts as one token. The last may have no text."""
        return self.has_token_ids or count <= self.num_chunks + 1

    def _num_untimed_tokens(self, count: int) -> int:
        """Return 1 if the last of ``count`` tokens came after the last chunk with content, else 0.

        It is the token that ended the text. The server's usage counts it, but a stream without ids
        shows no time for it.
        """
        shown = self.has_token_ids or self._server_count is None or self.finish == "length"
        return 0 if shown else int(count == self.num_chunks + 1)

    def first_chunk_excess(self, count: int) -> float:
        """Return the estimated share of the tokens after the first that came unseen with it."""
        if self._is_one_token_per_chunk(count):
            return 0.0
        return (count / self.num_chunks - 1) / (count - 1)

    def _failure_reason(self) -> str | None:
        """Return the reason that the response does not serve the request, or None if it does."""
        if self.refusal:
            return f"the server refused: {' '.join(self.refusal.split())}"
        if self.finish is None:
            return "the stream broke off" if not self.ended else "the stream has no finish reason"
        if self.finish not in ("stop", "length", "tool_calls"):
            return f"the finish reason is {self.finish}"
        if not self.num_reads:
            return f"the stream has no token (finish reason {self.finish})"
        return self._length_error()

    def _length_error(self) -> str | None:
        """Return a message if more or fewer tokens came than the request allows, else None."""
        params = self.request.params
        count = len(self.ids) if self.has_token_ids else self._server_count
        if count is None:
            stopped = params.ignore_eos and self.finish == "stop"
            return "the stream ended early: finish reason stop" if stopped else None
        if count > params.max_tokens:
            return f"the server returned {count} tokens, but max_tokens is {params.max_tokens}"
        if count < params.max_tokens and (params.ignore_eos or self.finish == "length"):
            tokens = f"{count} of {params.max_tokens} tokens"
            return f"the stream ended early: {tokens}, finish reason {self.finish}"
        return None


def error_event(request: Request, at: float, reason: str) -> StreamEvent:
    """Return the error event of a request that failed at time ``at``."""
    message = f"request {request.request_id}: {reason}"
    return StreamEvent(request.request_id, NO_TOKEN, "error", error=message, received=at)
