"""Chat in the terminal: streams answers; ctrl-C stops an answer, ctrl-D ends the shell."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from labkit.config import ConfigError
from labkit.engine.engine_protocol import InferenceEngine
from labkit.engine.llm import defer_sigint
from labkit.engine.output_processor import OutputProcessor
from labkit.engine.request import Request, SamplingParams
from labkit.models.tokenizer import Tokenizer

PROMPT = "> "
NEW_CONVERSATION = "/new"


class Shell:
    """A chat with the model; without a chat template it completes each line as plain text.

    Parameters
    ----------
    engine
        Used by this shell only.
    tokenizer
        The model's tokenizer.
    max_tokens
        Limit of an answer.
    out
        Stream to write to; None: standard output.
    read
        Returns a typed line; EOFError ends the shell.
    clock
        Returns seconds; tests pass a clock of their own.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer,
        max_tokens: int,
        *,
        out: TextIO | None = None,
        read: Callable[[str], str] = input,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = SamplingParams(max_tokens=max_tokens)
        self._out = out or sys.stdout
        self._read = read
        self._clock = clock
        self._history: list[dict[str, str]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Answer lines until the input ends."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and earlier lines for input()
        chat = self._tokenizer.template is not None
        what = "a conversation" if chat else "no chat template: a text is continued"
        self._line(f"{what}; ctrl-C stops an answer, {NEW_CONVERSATION} begins anew, ctrl-D ends")
        while True:
            try:
                line = self._read(PROMPT).strip()
            except EOFError:
                self._line("")
                return
            except KeyboardInterrupt:
                self._line("(ctrl-D ends)")
                continue
            if line == NEW_CONVERSATION:
                self._history.clear()
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        message = {"role": "user", "content": line}
        try:
            prompt = self._prompt(message)
        except ConfigError as error:
            self._line(str(error))
            return
        start, first, texts, count = self._clock(), None, [], 0
        status = ""
        try:
            for text, refusal in self._generate(prompt):
                if refusal is not None:
                    self._line(refusal)
                    return
                first = self._clock() if first is None else first
                count += 1
                texts.append(text)
                self._out.write(text)
                self._out.flush()
        except KeyboardInterrupt:
            status = "stopped, "
        self._history += [message, {"role": "assistant", "content": "".join(texts)}]
        self._line(f"\n[{status}{self._speed_text(start, first, count)}]")

    def _prompt(self, message: dict[str, str]) -> list[int]:
        if self._tokenizer.template is None:
            return self._tokenizer.encode(message["content"])
        return self._tokenizer.encode_chat([*self._history, message])

    def _generate(self, prompt: list[int]) -> Iterator[tuple[str, str | None]]:
        """Yield each token's text, and the engine's error or None; ctrl-C ends it after a step."""
        request = Request(f"shell-{next(self._numbers)}", tuple(prompt), self._params)
        processor = OutputProcessor(request, None, self._tokenizer)
        self._engine.submit(request)
        try:
            while self._engine.has_work():
                with defer_sigint():
                    events = self._engine.step()
                for event in events:
                    yield processor.advance(event)[0], event.error
        finally:
            with defer_sigint():
                self._engine.abort(request.request_id)

    def _speed_text(self, start: float, first: float | None, count: int) -> str:
        if first is None:
            return "no token"
        text = f"{count} token{'s' * (count != 1)}, the first after {first - start:.2f} s"
        since = self._clock() - first
        return f"{text}, {(count - 1) / since:.1f} tok/s" if count > 1 and since > 0 else text

    def _line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()
