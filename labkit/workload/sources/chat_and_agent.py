"""Requests in plain English about packaged texts: single questions, and sessions of agents.

- ``chat``: general questions, and questions about a text. The prompt of a question about a text is
  the text (or a part of it), an empty line and the question. If the model has a chat template, the
  prompt is one user message; otherwise it is plain text.
- ``agent``: each of six sessions goes through one text, part by part. A turn's prompt is a long
  system prompt that all sessions share (``agent_system.md``), all earlier turns of the session with
  scripted replies, the next part of the text and a question. So the prompt begins with the previous
  turn's prompt, and the request is sent after the previous turn has been answered. If the model has
  a chat template, the template formats the conversation.

The order of questions and texts, and the output lengths, are drawn from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import Experiment
from labkit.workload.sources.text_requests import TextRequest, TextSource, plain

PACKAGE_DIR = Path(__file__).parents[1]
SESSIONS = 6
TURN_QUESTIONS = (
    "What is this document, and who wrote it?",
    "What has changed since the beginning?",
    "Which names and numbers are new here?",
    "What do you know now that the person at the start could not?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the ``text`` that the question is about (empty for a general question)."""

    text: str
    question: str

    @property
    def prompt(self) -> str:
        return f"{self.text}\n\n{self.question}" if self.text else self.question


@cache
def questions() -> tuple[Question, ...]:
    """Return the packaged questions, each with the text that it is about."""
    return tuple(
        Question(_text(entry), entry["question"])
        for entry in json.loads((PACKAGE_DIR / "questions.json").read_text("utf-8"))
    )


def _text(entry: dict[str, Any]) -> str:
    """Return the entry's text or its paragraphs [first, last] of it; empty if it has none."""
    if "text" not in entry:
        return ""
    text = (PACKAGE_DIR / "texts" / f"{entry['text']}.md").read_text("utf-8").strip()
    if "paragraphs" not in entry:
        return text
    first, last = entry["paragraphs"]
    return "\n\n".join(text.split("\n\n")[first : last + 1])


def plan(seed: int, count: int) -> list[tuple[int, int]]:
    """Draw the order of the questions and each question's output tokens.

    Returns the first ``count`` pairs ``(question index, output tokens)`` of a list that depends
    only on the seed.
    """
    rng = np.random.default_rng([seed, 1])
    total = len(questions())
    order = rng.permutation(total)
    output = _output_tokens(rng, total, 40, 0.6, (8, 128))
    return [(int(order[i]), int(output[i])) for i in range(count)]


def _output_tokens(
    rng: np.random.Generator, count: int, median: int, sigma: float, bounds: tuple[int, int]
) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = rng.lognormal(log(median), sigma, count).astype(int)
    return np.clip(tokens, *bounds)


@cache
def system() -> str:
    """Return the system prompt of every session."""
    return (PACKAGE_DIR / "agent_system.md").read_text("utf-8").strip()


def conversations(seed: int) -> list[tuple[list[dict[str, str]], int, int]]:
    """Return each request's conversation as ``(messages, output tokens, session)``.

    The first turns of all sessions come first, then all second turns, and so on. After the first
    turn, they are those of the session's previous turn, a scripted reply and a new question.
    """
    texts = sorted((PACKAGE_DIR / "texts").glob("*.md"))
    rng = np.random.default_rng([seed, 3])
    chosen = [texts[i] for i in rng.permutation(len(texts))[:SESSIONS]]
    parts = [_parts(path.read_text("utf-8")) for path in chosen]
    histories = [[{"role": "system", "content": system()}] for _ in chosen]
    requests = []
    for turn, question in enumerate(TURN_QUESTIONS):
        output = _output_tokens(rng, SESSIONS, 24, 0.4, (8, 48))
        for session in rng.permutation(SESSIONS).tolist():
            part, history = parts[session][turn], histories[session]
            message = f"Document: {part}\n\nPerson: {question}"
            history.append({"role": "user", "content": message})
            requests.append((list(history), int(output[session]), session))
            history.append({"role": "assistant", "content": f"It says: {part.split('. ')[0]}."})
    return requests


def _parts(text: str) -> list[str]:
    """Split the beginning of a text into parts of complete paragraphs, one part per turn."""
    paragraphs = [p for p in text.strip().split("\n\n") if not p.startswith("#")]
    parts: list[str] = []
    for paragraph in paragraphs:
        if parts and len(parts[-1]) < 300:
            parts[-1] += f"\n\n{paragraph}"
        else:
            parts.append(paragraph)
    return parts[: len(TURN_QUESTIONS)]


def _chat(experiment: Experiment) -> Sequence[TextRequest]:
    packaged = questions()
    return [
        TextRequest((prompt,), output, ({"role": "user", "content": prompt},))
        for question, output in plan(experiment.seed, len(packaged))
        for prompt in [packaged[question].prompt]
    ]


def _agent(experiment: Experiment) -> Sequence[TextRequest]:
    return [
        TextRequest(tuple(map(plain, messages)), output, tuple(messages), f"s{session}")
        for messages, output, session in conversations(experiment.seed)
    ]


CHAT, AGENT = TextSource(_chat, "questions"), TextSource(_agent, "requests")
