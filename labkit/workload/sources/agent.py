"""Agent sessions: one long instruction that all share, and turns that repeat their past.

Six sessions read a packaged text each, part by part. A turn's prompt is the instruction
(``agent_system.md``), all earlier turns of the session with scripted replies, the next
part and a question, so it begins with the whole prompt before it, and waits for its answer.
Turn by turn, every session asks once. Texts, their order and the output lengths are drawn
from the seed. A model with a chat template gets the conversation as its template writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path

import numpy as np

from labkit.config import Experiment
from labkit.workload.sources.text_requests import Text, Texts, plain

HERE = Path(__file__).parents[1]
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
    """Read the instruction that every session begins with."""
    return (HERE / "agent_system.md").read_text("utf-8").strip()


def conversations(seed: int) -> list[tuple[list[dict[str, str]], int, int]]:
    """Write every request's conversation, which the session's later ones begin with.

    Returns
    -------
    list of tuple
        ``(messages, output tokens, session)``, turn by turn. The messages of a turn are those
        of the session's turn before, a scripted reply and a question.
    """
    texts = sorted((HERE / "texts").glob("*.md"))
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
            asked = f"Document: {part}\n\nPerson: {question}"
            history.append({"role": "user", "content": asked})
            requests.append((list(history), int(output[session]), session))
            history.append({"role": "assistant", "content": f"It says: {part.split('. ')[0]}."})
    return requests


def _parts(text: str) -> list[str]:
    """Cut the beginning of a text into one part per turn, of whole paragraphs."""
    paragraphs = [p for p in text.strip().split("\n\n") if not p.startswith("#")]
    parts: list[str] = []
    for paragraph in paragraphs:
        if parts and len(parts[-1]) < 300:
            parts[-1] += f"\n\n{paragraph}"
        else:
            parts.append(paragraph)
    return parts[: len(QUESTIONS)]


def _texts(experiment: Experiment) -> Sequence[Text]:
    return [
        Text(tuple(map(plain, messages)), output, tuple(messages), f"s{session}")
        for messages, output, session in conversations(experiment.seed)
    ]


SOURCE = Texts(_texts, "requests")
