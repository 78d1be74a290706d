"""Requests of vLLM's custom dataset: JSON lines such as ``{"prompt": ..., "output_tokens": 20}``.

As in ``vllm bench serve --dataset-name custom``, the prompt is one user message if the model has a
chat template, and other keys are ignored. Without ``output_tokens`` the output length is drawn
from ``workload.prompts.output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.config import Experiment, ListedRequest, Message, require
from labkit.config.option import Group, option
from labkit.config.requests import MAX_LENGTH_TOKENS
from labkit.workload.sources import json_lines
from labkit.workload.sources.listed import texts
from labkit.workload.sources.text_requests import TextRequest, TextSource


@dataclass
class CustomRequest(Group):
    """One line of a file in the format of vLLM's custom dataset."""

    prompt: str | None = option(None)
    output_tokens: int | None = option(None, ge=1, le=MAX_LENGTH_TOKENS, unit="tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.prompt is not None, "prompt is missing")
        user_request(self.prompt or "")


def user_request(prompt: str, max_tokens: int | None = None) -> ListedRequest:
    """Return a request with one user message; raises :class:`labkit.config.ConfigError`."""
    return ListedRequest(messages=[Message("user", prompt)], max_tokens=max_tokens)


def _read(experiment: Experiment) -> Sequence[TextRequest]:
    path = experiment.workload.prompts.path or ""
    lines = json_lines.read(path, CustomRequest, other_keys=True)
    listed = [user_request(line.prompt or "", line.output_tokens) for line in lines]
    requests = zip(lines, texts(experiment, listed), strict=True)
    return [replace(text, parts=(line.prompt or "",)) for line, text in requests]


SOURCE = TextSource(_read, "requests")
