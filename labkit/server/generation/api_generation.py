"""The generation of one API request: its engine requests, their outputs, the parts of a message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from labkit.engine.engine_protocol import NO_TOKEN, Logprobs, PromptLogprobs, TokenEvent
from labkit.engine.output_processor import OutputProcessor
from labkit.engine.request import Request
from labkit.models.tokenizer import Tokenizer
from labkit.server.constraints.tool_call_parser import ParsedToolCall, ToolCallParser
from labkit.server.types.api_error import ApiError, internal_error, invalid

OnEnd = Callable[[str, bool, str], None]
# A text or a tool call of a generated message.
Part = str | ParsedToolCall


@dataclass(slots=True)
class RequestTimestamps:
    """Times of an engine request's events (seconds, monotonic clock), and its token count.

    ``admitted`` is the start of the step in which the request started running. ``first`` and
    ``last`` are the times of its first and latest token. A time is None until its event happens.
    """

    arrived: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


# A struct rather than a dataclass, because one is created per token: ten times as fast.
class TokenOutput(msgspec.Struct, frozen=True):
    """The next token of a choice, or the choice's end.

    ``token`` is None if the choice ends without another token. ``text`` is the text that this
    output adds to the choice (often empty). ``finish_reason`` is set only on a choice's last
    output. ``stop`` is the stop string that ended the choice, or None. ``prompt_logprobs`` is set
    in a choice's first output, if the request asked for it.
    """

    index: int
    token: int | None
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: Logprobs | None
    stop: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Generation:
    """The generation of one API request: its engine requests, and the outputs not yet read.

    Every method must be called on the event loop. An output's ``index`` counts choices across
    prompts: with two choices per prompt, the choices of the second prompt have the indices 2 and 3.

    ``on_end`` is called when an engine request ends, with three arguments: the request's id,
    whether the engine must still abort the request, and the reason (stop, length or abort).

    ``single_call_parser`` returns a parser that ends a choice after its first tool call, or None if
    calls do not end a choice. ``prompt_only``: the client wants only the prompt's log
    probabilities, so the one token that the engine generates is dropped.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        on_end: OnEnd,
        single_call_parser: Callable[[], ToolCallParser | None] = lambda: None,
        *,
        prompt_only: bool = False,
    ) -> None:
        self.created = int(time.time())
        self._on_end = on_end
        self._choices = {
            request.request_id: (index, OutputProcessor(request, None, tokenizer))
            for index, request in enumerate(requests)
        }
        self.prompt_only = prompt_only
        self._parsers = [single_call_parser() for _ in requests]
        self.requests = {request.request_id: request for request in requests}
        self._num_cached_tokens = [0] * len(requests)
        now = time.monotonic()
        self.times = {request.request_id: RequestTimestamps(now) for request in requests}
        self._unfinished = set(self._choices)
        self._outputs: list[TokenOutput] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Queue the output of an engine request's event. ``wake`` lets ``outputs`` yield it."""
        if event.request_id not in self._unfinished:
            return
        if event.finish_reason == "error":
            self.fail(invalid(event.error or "the engine refused the request"))
            return
        index, processor = self._choices[event.request_id]
        self._num_cached_tokens[index] = event.num_cached_tokens
        try:
            text, reason = processor.advance(event)
            if self._has_single_call(index, text):
                reason = "stop"
        except Exception as error:  # the tokenizers library failed; other requests must go on
            self.fail(internal_error(error))
            return
        token = None if event.token == NO_TOKEN else event.token
        if self.prompt_only:  # the token that is dropped may be one that ends a request
            token, text, reason = None, "", "length"
        if reason is not None:
            self._unfinished.discard(event.request_id)
            self._on_end(event.request_id, event.finish_reason is None, reason)
        finish_reason: Any = reason
        self._outputs.append(
            TokenOutput(
                index,
                token,
                text,
                finish_reason,
                event.logprobs,
                processor.stop_text,
                event.prompt_logprobs,
            )
        )

    def _has_single_call(self, index: int, text: str) -> bool:
        """Return whether ``text`` completes the tool call with which choice ``index`` must end."""
        parser = self._parsers[index]
        if parser is None:
            return False
        for _ in parser.add(text):
            pass
        return parser.has_ended

    def num_cached_tokens(self, n: int = 1) -> int:
        """Return how many prompt tokens the prefix cache held, summed over the prompts.

        With ``n`` choices per prompt, only the first choice is counted, because the others may hit
        what the first has computed. A prompt counts as 0 until its first output token.
        """
        return sum(self._num_cached_tokens[::n])

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, which ``outputs`` raises after the unread outputs."""
        if self._error is None and self._unfinished:
            self._error = error
            self.close()
            self.wake()

    def wake(self) -> None:
        """Wake the coroutine that waits in ``outputs``, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outputs(self) -> AsyncIterator[list[TokenOutput]]:
        """Yield new outputs until every choice has ended. Raises ``ApiError`` on a failure."""
        loop = asyncio.get_running_loop()
        while True:
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                yield outputs
            elif self._error is not None:
                raise self._error
            elif not self._unfinished:
                return
            else:
                self._waiter = loop.create_future()
                await self._waiter

    def close(self) -> None:
        """Abort the engine requests that have not ended. Further calls do nothing."""
        for request_id in self._unfinished:
            self._on_end(request_id, True, "abort")
        self._unfinished.clear()


def output_parts(output: TokenOutput, parser: ToolCallParser | None) -> list[Part]:
    """Return the texts and calls that an output completes. No parser: there are no calls."""
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
