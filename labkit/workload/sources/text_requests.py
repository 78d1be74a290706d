"""Requests as text, and how they become token ids."""

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
class Text:
    """One request before it is tokenised.

    ``messages``: the conversation, which a model's chat template writes. ``pieces``: what stands
    for it where there is no conversation, or no template; each is tokenised by itself, so that a
    repeated past has the same token ids.
    """

    pieces: tuple[str, ...]
    max_tokens: int
    messages: tuple[Mapping[str, str], ...] | None = None
    session: str | None = None
    timestamp_ms: float | None = None

    @property
    def name(self) -> str:
        """What the request is called where every request is a case."""
        if self.messages is not None and len(self.messages) == 1:
            return self.messages[0]["content"]
        return "".join(self.pieces)


class Texts:
    """The first ``workload.num_requests`` of the texts that a reader returns.

    ``what``: what they are, in the plural.
    """

    def __init__(self, read: Callable[[Experiment], Sequence[Text]], what: str) -> None:
        self._read = read
        self._what = what

    def _asked(self, experiment: Experiment) -> Sequence[Text]:
        found = take_first(experiment, self._read(experiment), self._what)
        names = {text.name for text in found}
        require(
            not experiment.workload.per_request or len(names) == len(found),
            "workload.per_request=true: two requests are the same text, and each is to be a case",
        )
        return found

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts; the texts by their digest."""
        texts = hashlib.sha256(repr(self._asked(experiment)).encode()).hexdigest()
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
            for index, text in enumerate(self._asked(experiment))
        )

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Guess prompt tokens from the bytes."""
        return [
            (1 + sum(len(piece.encode()) for piece in text.pieces) // BYTES_PER_TOKEN, output)
            for text in self._asked(experiment)
            for output in [text.max_tokens]
        ]


def _ids(reader: Tokenizer) -> Callable[[Text], tuple[int, ...]]:
    encode = cache(reader.encode)

    def ids(text: Text) -> tuple[int, ...]:
        if reader.template is not None and text.messages is not None:
            return tuple(reader.encode_chat(text.messages))
        return tuple(token for piece in text.pieces for token in encode(piece))

    return ids


def plain(message: Mapping[str, str]) -> str:
    """Write a message for a model without a chat template: a question asks for its answer."""
    forms = {"system": "{}", "user": "\n\n{}\n\nAssistant:", "assistant": " {}"}
    return forms[message["role"]].format(message["content"])
