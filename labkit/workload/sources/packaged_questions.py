"""Questions in plain English: general questions, and questions about a packaged text.

The prompt of a question about a text is the text (or a part of it), an empty line and the question.
If the model has a chat template, the prompt is one user message; otherwise it is plain text. The
order of the questions and the output lengths are drawn from the seed.
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

from labkit.config import Experiment
from labkit.workload.sources.text_requests import TextRequest, TextSource

PACKAGE_DIR = Path(__file__).parents[1]
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE = 40, 0.6, (8, 128)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the ``text`` that the question is about (empty for a general question)."""

    text: str
    question: str

    @property
    def prompt(self) -> str:
        """The text, an empty line and the question; or the question alone."""
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
    drawn = rng.lognormal(log(OUTPUT_MEDIAN), OUTPUT_SIGMA, total).astype(int)
    output = np.clip(drawn, *OUTPUT_RANGE)
    return [(int(order[i]), int(output[i])) for i in range(count)]


def _texts(experiment: Experiment) -> Sequence[TextRequest]:
    packaged = questions()
    return [
        TextRequest((prompt,), output, ({"role": "user", "content": prompt},))
        for question, output in plan(experiment.seed, len(packaged))
        for prompt in [packaged[question].prompt]
    ]


SOURCE = TextSource(_texts, "questions")
