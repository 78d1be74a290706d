"""Requests with text prompts, and their conversion to token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import Experiment, require
from labkit.models import ModelDir, tokenizer
from labkit.workload.tokenized_prompt import Prompt, take_first

BYTES_PER_TOKEN = 4  # of a tokenizer trained on the packaged texts; used only in estimates


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request before tokenisation.

    ``messages``: the conversation, used if the model has a chat template. ``parts``: the plain
    text, used otherwise (``Tokenizer.encode_turns``). ``answer``: a recorded answer. Its number of
    tokens becomes the output length, and ``max_tokens`` is only an estimate of it.
    """

    parts: tuple[str, ...]
    max_tokens: int
    messages: tuple[Mapping[str, str], ...] | None = None
    session: str | None = None
    timestamp_ms: float | None = None
    answer: str | None = None

    @property
    def name(self) -> str:
        """The request's text, which names its case if ``workload.per_request`` is set."""
        if self.messages is not None and len(self.messages) == 1:
            return self.messages[0]["content"]
        return "".join(self.parts)


@dataclass(frozen=True)
class TextSource:
    """A prompt source with the first ``workload.num_requests`` text requests that ``read`` returns.

    ``plural``: the noun for the requests in error messages.
    """

    read: Callable[[Experiment], Sequence[TextRequest]]
    plural: str

    def _requests(self, experiment: Experiment) -> Sequence[TextRequest]:
        requests = take_first(experiment, self.read(experiment), self.plural)
        names = {text.name for text in requests}
        require(
            not experiment.workload.per_request or len(names) == len(requests),
            "workload.per_request=true makes every request a case, but two have the same text; "
            "change one",
        )
        return requests

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Return the source's name, the digest of the requests, and ``workload.per_request``."""
        texts = hashlib.sha256(repr(self._requests(experiment)).encode()).hexdigest()
        named = experiment.workload.per_request
        return {"source": experiment.workload.prompts.source, "texts": texts, "named": named}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        reader = tokenizer.load(model.path)
        named = experiment.workload.per_request

        def answer_tokens(answer: str) -> int:
            return max(1, len(reader.encode_pieces(["", answer])))

        return tuple(
            Prompt(
                text.name if named else f"r{index:03d}",
                _ids(reader, text),
                text.max_tokens if text.answer is None else answer_tokens(text.answer),
                text.session,
                text.timestamp_ms,
                text.messages,
            )
            for index, text in enumerate(self._requests(experiment))
        )

    def timestamps_ms(self, experiment: Experiment) -> list[float | None]:
        return [text.timestamp_ms for text in self._requests(experiment)]

    def num_sessions(self, experiment: Experiment) -> int:
        """Return the number of sessions, and of requests without one."""
        sessions = [text.session for text in self._requests(experiment)]
        return sessions.count(None) + len({*sessions} - {None})

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        return [
            (1 + len("".join(text.parts).encode()) // BYTES_PER_TOKEN, text.max_tokens)
            for text in self._requests(experiment)
        ]


def _ids(reader: tokenizer.Tokenizer, text: TextRequest) -> tuple[int, ...]:
    if text.messages is not None and (reader.template or reader.template_error):
        return tuple(reader.encode_chat(text.messages))
    return tuple(reader.encode_turns(text.parts))


def plain(message: Mapping[str, str]) -> str:
    """Return a message as plain text, for a model without a chat template."""
    formats = {"system": "{}", "user": "\n\n{}\n\nAssistant:", "assistant": " {}"}
    return formats[message["role"]].format(message["content"])
