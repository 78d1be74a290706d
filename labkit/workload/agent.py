"""Agent sessions: one long instruction that all share, and turns that repeat their past.

Six sessions read a packaged text each, part by part. A turn's prompt is the instruction
(``agent_system.md``), all earlier turns of the session with scripted replies, the next
part and a question, so it begins with the whole prompt before it. Turn by turn, every
session asks once. Texts, their order and the output lengths are drawn from the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.prompts import Prompt, first
from labkit.workload.requests import RequestKind

HERE = Path(__file__).parent
BYTES_PER_TOKEN = 4  # of a tokenizer trained on these texts; for estimates only
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


def pieces(seed: int) -> list[tuple[list[str], int]]:
    """Write every request's prompt as the pieces that later prompts repeat, in order.

    Returns
    -------
    list of tuple
        ``(pieces, output tokens)``, turn by turn. The pieces of a turn are those of the
        session's turn before and two more.
    """
    texts = sorted((HERE / "texts").glob("*.md"))
    rng = np.random.default_rng([seed, 3])
    chosen = [texts[i] for i in rng.permutation(len(texts))[:SESSIONS]]
    parts = [_parts(path.read_text("utf-8")) for path in chosen]
    histories: list[list[str]] = [[system()] for _ in chosen]
    requests = []
    for turn, question in enumerate(QUESTIONS):
        drawn = rng.lognormal(log(OUTPUT_MEDIAN), OUTPUT_SIGMA, SESSIONS).astype(int)
        output = np.clip(drawn, *OUTPUT_RANGE)
        for session in rng.permutation(SESSIONS).tolist():
            part, history = parts[session][turn], histories[session]
            asked = f"\n\nDocument: {part}\n\nPerson: {question}\n\nAssistant:"
            requests.append(([*history, asked], int(output[session])))
            history += [asked, f" It says: {part.split('. ')[0]}."]
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


class AgentSource:
    """The first ``workload.num_requests`` turns."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts; the texts by their digest."""
        asked = first(experiment, pieces(experiment.seed))
        return {"kind": "agent", "texts": hashlib.sha256(repr(asked).encode()).hexdigest()}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise piece by piece, so that a repeated past has the same token ids."""
        from labkit.models import tokenizer

        encode = cache(tokenizer.load(model.path).encode)
        return tuple(
            Prompt(f"r{index:03d}", tuple(t for piece in made for t in encode(piece)), output)
            for index, (made, output) in enumerate(first(experiment, pieces(experiment.seed)))
        )

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Guess prompt tokens from the bytes."""
        return [
            (1 + sum(len(piece.encode()) for piece in made) // BYTES_PER_TOKEN, output)
            for made, output in first(experiment, pieces(experiment.seed))
        ]


KIND = RequestKind(AgentSource())
