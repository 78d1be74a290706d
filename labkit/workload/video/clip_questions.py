"""Questions about clips of the user's own, which a vision-language model answers.

Loading and asking goes through mlx-vlm; it was not run where labkit is developed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from labkit.config import ConfigError, Workload, require
from labkit.workload.video.clip_reader import Pixels

LETTERS = "ABCDEFGHIJ"
KEYS = ("clip", "question", "choices", "answer")


@dataclass(frozen=True)
class Question:
    """A question with its choices; ``answer`` is the number of the right one."""

    clip: str
    question: str
    choices: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """What the model is asked, with a letter before every choice."""
        listed = [f"{letter}. {text}" for letter, text in zip(LETTERS, self.choices, strict=False)]
        return "\n".join([self.question, *listed, "Answer with one letter."])

    def right(self, said: str) -> bool:
        """Tell whether the first letter of what the model said is the right one's."""
        return said.strip()[:1].upper() == LETTERS[self.answer]


def read(path: str, clips: Collection[str]) -> list[Question]:
    """Read questions: lines of JSON with clip, question, choices and answer (its number, from 0).

    Raises
    ------
    ConfigError
        One line with the file and the line.
    """
    where = f"workload.questions={path}"
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{where}: {reason}") from None
    found = [
        _question(line, f"{where}: line {number}", clips)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    require(bool(found), f"{where}: there is no question in it")
    return found


def _question(line: str, where: str, clips: Collection[str]) -> Question:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    require(isinstance(data, dict), f"{where}: not an object with {', '.join(KEYS)}")
    missing = [key for key in KEYS if key not in data]
    require(not missing, f"{where}: {', '.join(missing)} is missing")
    clip, text, choices, answer = (data[key] for key in KEYS)
    require(clip in clips, f"{where}: clip={clip!r} is not a file of workload.clips")
    require(isinstance(text, str) and bool(text), f"{where}: question must be a text")
    require(
        isinstance(choices, list)
        and 2 <= len(choices) <= len(LETTERS)
        and all(isinstance(choice, str) for choice in choices),
        f"{where}: choices must be 2 to {len(LETTERS)} texts",
    )
    require(
        type(answer) is int and 0 <= answer < len(choices),
        f"{where}: answer={answer!r}: allowed are 0 to {len(choices) - 1}, a choice's number",
    )
    return Question(clip, text, tuple(choices), answer)


def check(workload: Workload, clips: Collection[str]) -> None:
    """Check the questions, and that there is somebody to answer them."""
    if workload.questions is None:
        return
    read(workload.questions, clips)
    require(
        importlib.util.find_spec("mlx_vlm") is not None,
        f"workload.questions={workload.questions}: answering needs mlx-vlm, which is not "
        "installed: pip install mlx-vlm",
    )


class Model(Protocol):
    """Answers a question about frames."""

    def answer(self, frames: Sequence[Pixels], prompt: str) -> str:
        """Return what it says, one token or a few."""


class MlxVlm:
    """A model that mlx-vlm loads."""

    def __init__(self, path: str) -> None:
        from mlx_vlm import load
        from mlx_vlm.utils import load_config

        self._model, self._processor = load(path)
        self._config = load_config(path)

    def answer(self, frames: Sequence[Pixels], prompt: str) -> str:
        """Ask about the frames as so many pictures, greedily, for one token."""
        from mlx_vlm import generate
        from mlx_vlm.prompt_utils import apply_chat_template
        from PIL import Image

        pictures = [Image.fromarray(frame) for frame in frames]
        asked = apply_chat_template(self._processor, self._config, prompt, num_images=len(pictures))
        said: Any = generate(
            self._model, self._processor, asked, pictures, max_tokens=1, temperature=0.0
        )
        return str(getattr(said, "text", said))


@dataclass(frozen=True)
class Quiz:
    """Questions and who answers them."""

    questions: Sequence[Question]
    model: Model

    def about(self, clip: str) -> bool:
        """Tell whether there is a question about a clip."""
        return any(question.clip == clip for question in self.questions)

    def ask(self, frames: Mapping[str, Sequence[Pixels]]) -> dict[str, int]:
        """Ask about every clip whose frames there are; count the questions and right answers."""
        asked = [question for question in self.questions if question.clip in frames]
        right = sum(q.right(self.model.answer(frames[q.clip], q.prompt)) for q in asked)
        return {"questions": len(self.questions), "asked": len(asked), "right": right}
