"""A chat shell for the terminal. Ctrl-C stops a reply, ctrl-D ends the shell."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TextIO

from labkit.config import ConfigError
from labkit.engine.engine_protocol import InferenceEngine, LengthLimited
from labkit.engine.llm import defer_sigint
from labkit.engine.output_processor import OutputProcessor
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.models.tokenizer import Tokenizer

PROMPT = "> "
NEW_CONVERSATION = "/new"
MAX_REPLY_TOKENS = 2_048  # where server.max_output_tokens is null


class Shell:
    """A chat with the model. If the model has no chat template, each line is a text to complete.

    ``engine`` is warmed up, and nobody else uses it. A reply has at most ``max_tokens`` tokens and
    is written to ``out``, by default standard output. ``read`` shows the prompt that it gets and
    returns the typed line. EOFError ends the shell.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer,
        max_tokens: int,
        *,
        out: TextIO | None = None,
        read: Callable[[str], str] = input,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = SamplingParams(max_tokens=max_tokens)
        self._out = out or sys.stdout
        self._read = read
        self._history: list[dict[str, str]] = []
        self._request_numbers = itertools.count()

    def run(self) -> None:
        """Reply to lines until the input ends."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() arrow keys and a history
        chat = self._tokenizer.template is not None
        mode = (
            "chat"
            if chat
            else f"{self._tokenizer.template_error or 'the model has no chat template'}, so each "
            "line is completed as plain text"
        )
        self._print(
            f"{mode}; ctrl-C stops a reply, {NEW_CONVERSATION} clears the chat, ctrl-D exits"
        )
        while True:
            try:
                line = self._read(PROMPT).strip()
            except EOFError:
                self._print("")
                return
            except KeyboardInterrupt:
                self._print("(ctrl-D exits)")
                continue
            if line == NEW_CONVERSATION:
                self._history.clear()
            elif line:
                self._reply(line)

    def _reply(self, line: str) -> None:
        message = {"role": "user", "content": line}
        try:
            prompt = self._prompt(message)
        except ConfigError as error:
            self._print(str(error))
            return
        start, first_token, texts = time.perf_counter(), None, []
        status = ""
        try:
            for text, engine_error in self._generate(prompt):
                if engine_error is not None:
                    self._print(engine_error)
                    return
                first_token = time.perf_counter() if first_token is None else first_token
                texts.append(text)
                self._out.write(text)
                self._out.flush()
        except KeyboardInterrupt:
            status = "stopped, "
        self._history += [message, {"role": "assistant", "content": "".join(texts)}]
        self._print(f"\n[{status}{self._speed_text(start, first_token, len(texts))}]")

    def _prompt(self, message: dict[str, str]) -> list[int]:
        if self._tokenizer.template is None:
            return self._tokenizer.encode(message["content"])
        return self._tokenizer.encode_chat([*self._history, message])

    def _generate(self, prompt: list[int]) -> Iterator[tuple[str, str | None]]:
        """Yield each token's text and the engine's error. Ctrl-C takes effect after a step."""
        params = self._params
        if isinstance(self._engine, LengthLimited):
            room = self._engine.max_request_tokens() - len(prompt)
            params = replace(params, max_tokens=max(1, min(params.max_tokens, room)))
        request = Request(f"shell-{next(self._request_numbers)}", tuple(prompt), params)
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

    def _speed_text(self, start: float, first_token: float | None, count: int) -> str:
        if first_token is None:
            return "no token"
        text = f"{count} token{'s' * (count != 1)}, the first after {first_token - start:.2f} s"
        decode_s = time.perf_counter() - first_token
        if count > 1 and decode_s > 0:
            text = f"{text}, {(count - 1) / decode_s:.1f} tok/s"
        return text

    def _print(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()
