"""The packaged texts on which the tokenizers of synthetic models are trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from labkit.config import ConfigError

TEXTS_FOLDER = "workload/texts"
QUESTIONS_FILE = "workload/questions.json"


def corpus_texts(package: Traversable | None = None) -> tuple[str, ...]:
    """Return all packaged texts, then all strings of questions.json, in a fixed order.

    ``package``: the folder that contains ``workload/``; by default the package labkit. Raises
    ``ConfigError`` if the installation lacks the files.
    """
    package = files("labkit") if package is None else package
    folder = package.joinpath(TEXTS_FOLDER)
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    texts = [folder.joinpath(n).read_text("utf-8") for n in names if n.endswith(".md")]
    questions = package.joinpath(QUESTIONS_FILE)
    if not texts or not questions.is_file():
        missing = f"{TEXTS_FOLDER}/*.md" if not texts else QUESTIONS_FILE
        raise ConfigError(
            f"the installation of labkit is incomplete: {package} has no {missing}; reinstall it"
        )
    return (*texts, *_strings(json.loads(questions.read_text("utf-8"))))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
