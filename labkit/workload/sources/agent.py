"""Agent sessions: a long shared system prompt, and turns that repeat the conversation so far.

Each of six sessions goes through one packaged text, part by part. A turn's prompt is the system
prompt (``agent_system.md``), all earlier turns of the session with scripted replies, the next part
of the text and a question. So the prompt begins with the previous turn's prompt, and the request is
sent after the previous turn has been answered. Texts, their order and the output lengths are drawn
from the seed. If the model has a chat template, the template formats the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path

import numpy as np

from labkit.config import Experiment
from labkit.workload.sources.text_requests import TextRequest, TextSource, plain

PACKAGE_DIR = Path(__file__).parents[1]
SESSIONS = 6
QUESTIONS = (
    "What is this document, and who wrote it?",
    "What has changed since the beginning?",
    "Which names and numbers are new here?",
    "What do you know now that the person at the start could not?",
)
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE = 24, 0.4, (8, 48)


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
    for turn, question in enumerate(QUESTIONS):
        drawn = rng.lognormal(log(OUTPUT_MEDIAN), OUTPUT_SIGMA, SESSIONS).astype(int)
        output = np.clip(drawn, *OUTPUT_RANGE)
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
    return parts[: len(QUESTIONS)]


def _texts(experiment: Experiment) -> Sequence[TextRequest]:
    return [
        TextRequest(tuple(map(plain, messages)), output, tuple(messages), f"s{session}")
        for messages, output, session in conversations(experiment.seed)
    ]


SOURCE = TextSource(_texts, "requests")
