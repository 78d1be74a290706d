"""Questions about the user's clips, answered by a vision-language model.

mlx-vlm loads the model and generates the answers. labkit's tests use only a stand-in model.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, Workload, require
from labkit.workload.video.clip_reader import Pixels

LETTERS = "ABCDEFGHIJ"
KEYS = ("clip", "question", "choices", "answer")


@dataclass(frozen=True)
class VideoQuestion:
    """A multiple-choice question on a clip. ``answer`` is the index of the right choice."""

    clip: str
    question: str
    choices: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """The prompt: the question, and the choices with a letter before each."""
        listed = [f"{letter}. {text}" for letter, text in zip(LETTERS, self.choices, strict=False)]
        return "\n".join([self.question, *listed, "Answer with one letter."])

    def is_right(self, reply: str) -> bool:
        return reply.strip()[:1].upper() == LETTERS[self.answer]


def read(path: str, clips: Collection[str]) -> list[VideoQuestion]:
    """Read questions from a JSON-lines file with clip, question, choices and answer.

    The answer is the index of the right choice, from 0. ``clips``: the names that are allowed.
    Raises ``ConfigError`` if the file cannot be read, or a line is invalid. The message names the
    file and the line.
    """
    where = f"workload.questions={path}"
    try:
        lines = Path(path).expanduser().read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{where}: {reason}") from None
    questions = [
        _question(line, f"{where}: line {number}", clips)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    require(bool(questions), f"{where} has no questions")
    return questions


def _question(line: str, where: str, clips: Collection[str]) -> VideoQuestion:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    require(isinstance(data, dict), f"{where} is not a JSON object with {', '.join(KEYS)}")
    missing = [key for key in KEYS if key not in data]
    require(not missing, f"{where}: missing keys: {', '.join(missing)}")
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
        f"{where}: answer={answer!r}: must be 0 to {len(choices) - 1}, the number of a choice",
    )
    return VideoQuestion(clip, text, tuple(choices), answer)


def check(workload: Workload, clips: Collection[str]) -> None:
    """Check that the configured questions are valid and that mlx-vlm is installed.

    Raises ``ConfigError``; does nothing if no questions are configured.
    """
    if workload.questions is None:
        return
    read(workload.questions, clips)
    require(
        importlib.util.find_spec("mlx_vlm") is not None,
        f"workload.questions={workload.questions}: answering needs mlx-vlm, which is not "
        "installed; run: pip install mlx-vlm",
    )


class MlxVlm:
    """A vision-language model that mlx-vlm loads and runs."""

    def __init__(self, path: str) -> None:
        from mlx_vlm import load
        from mlx_vlm.utils import load_config

        self._model, self._processor = load(path)
        self._config = load_config(path)

    def answer(self, frames: Sequence[Pixels], prompt: str) -> str:
        """Return the answer to a question about frames: its text, of one token or a few."""
        from mlx_vlm import generate
        from mlx_vlm.prompt_utils import apply_chat_template
        from PIL import Image

        pictures = [Image.fromarray(frame) for frame in frames]
        chat = apply_chat_template(self._processor, self._config, prompt, num_images=len(pictures))
        reply: Any = generate(
            self._model, self._processor, chat, pictures, max_tokens=1, temperature=0.0
        )
        return str(getattr(reply, "text", reply))


@dataclass(frozen=True)
class VideoQuiz:
    """A set of questions, and the model that answers them."""

    questions: Sequence[VideoQuestion]
    model: MlxVlm

    def about(self, clip: str) -> bool:
        return any(question.clip == clip for question in self.questions)

    def ask(self, frames: Mapping[str, Sequence[Pixels]]) -> dict[str, int]:
        """Ask the questions on the clips in ``frames``.

        Returns three numbers: of all ``questions``, of those ``asked``, and of ``right`` answers.
        """
        questions = [question for question in self.questions if question.clip in frames]
        right = sum(q.is_right(self.model.answer(frames[q.clip], q.prompt)) for q in questions)
        return {"questions": len(self.questions), "asked": len(questions), "right": right}
