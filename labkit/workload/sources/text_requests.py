"""Text requests, and their conversion to token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from labkit.config import Experiment, require
from labkit.models import ModelDir
from labkit.workload.tokenized_prompts import Prompt, take_first

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer

BYTES_PER_TOKEN = 4  # of a tokenizer trained on the packaged texts; for estimates only


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request before tokenisation.

    ``messages``: the conversation, for the model's chat template. ``parts``: the text without a
    conversation or template. Each part is tokenised separately, so that a repeated part has the
    same token ids.
    """

    parts: tuple[str, ...]
    max_tokens: int
    messages: tuple[Mapping[str, str], ...] | None = None
    session: str | None = None
    timestamp_ms: float | None = None

    @property
    def name(self) -> str:
        """Name of the request's case, if every request is a case."""
        if self.messages is not None and len(self.messages) == 1:
            return self.messages[0]["content"]
        return "".join(self.parts)


class TextSource:
    """The first ``workload.num_requests`` text requests that a reader returns.

    ``plural``: the noun for them in error messages.
    """

    def __init__(self, read: Callable[[Experiment], Sequence[TextRequest]], plural: str) -> None:
        self._read = read
        self._plural = plural

    def _requests(self, experiment: Experiment) -> Sequence[TextRequest]:
        requests = take_first(experiment, self._read(experiment), self._plural)
        names = {text.name for text in requests}
        require(
            not experiment.workload.per_request or len(names) == len(requests),
            "workload.per_request=true: every request is a case, but two have the same text",
        )
        return requests

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Return the source and the digest of the texts that decide the prompts."""
        texts = hashlib.sha256(repr(self._requests(experiment)).encode()).hexdigest()
        named = experiment.workload.per_request
        return {"source": experiment.workload.prompts.source, "texts": texts, "named": named}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise with the model's own tokenizer and chat template."""
        from labkit.models import tokenizer

        ids = _ids(tokenizer.load(model.path))
        named = experiment.workload.per_request
        return tuple(
            Prompt(
                text.name if named else f"r{index:03d}",
                ids(text),
                text.max_tokens,
                text.session,
                text.timestamp_ms,
                text.messages,
            )
            for index, text in enumerate(self._requests(experiment))
        )

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Estimate prompt tokens from the number of bytes."""
        return [
            (1 + sum(len(piece.encode()) for piece in text.parts) // BYTES_PER_TOKEN, output)
            for text in self._requests(experiment)
            for output in [text.max_tokens]
        ]


def _ids(reader: Tokenizer) -> Callable[[TextRequest], tuple[int, ...]]:
    encode = cache(reader.encode)

    def ids(text: TextRequest) -> tuple[int, ...]:
        if reader.template is not None and text.messages is not None:
            return tuple(reader.encode_chat(text.messages))
        return tuple(token for piece in text.parts for token in encode(piece))

    return ids


def plain(message: Mapping[str, str]) -> str:
    """Return a message as plain text, for a model without a chat template."""
    formats = {"system": "{}", "user": "\n\n{}\n\nAssistant:", "assistant": " {}"}
    return formats[message["role"]].format(message["content"])
