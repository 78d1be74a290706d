"""Texts to score, cut into windows of equal length."""

from __future__ import annotations

import json
from pathlib import Path

from labkit.config import ConfigError, Experiment, require
from labkit.engine.budget import model_footprint
from labkit.machine.exception_text import one_line
from labkit.models import ModelDir, resolve, tokenizer
from labkit.models.tokenizer_corpus import corpus_texts
from labkit.workload.tokenized_prompts import Prompt, cached_prompts, prompt_key

MAX_FILE_BYTES = 256 << 20
PACKAGED_TEXTS = 10  # number of texts at the start of the corpus; the rest are single questions


def read_texts(path: str | None) -> tuple[str, ...]:
    """Return the texts of ``workload.texts``, or packaged texts if ``path`` is None.

    If the name of the file ends with ``.jsonl``, each line is an object with the key ``text``. Any
    other file is one text.

    Raises
    ------
    ConfigError
        The file cannot be read, is not UTF-8, or has no text. The message is one line.
    """
    if path is None:
        return corpus_texts()[:PACKAGED_TEXTS]
    where = f"workload.texts={path}"
    try:
        size = Path(path).stat().st_size
        require(
            size <= MAX_FILE_BYTES, f"{where} has {size:,} bytes; the maximum is {MAX_FILE_BYTES:,}"
        )
        content = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 at byte {error.start}") from None
    require(bool(content.strip()), f"{where} is empty")
    if not path.endswith(".jsonl"):
        return (content,)
    lines = enumerate(content.split("\n"), 1)
    return tuple(_text(f"{where}, line {number}", line) for number, line in lines if line.strip())


def _text(where: str, line: str) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {one_line(error)}") from None
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where}: must be an object such as {{"text": "..."}}, with a text')
    return text


def check_windows(experiment: Experiment) -> None:
    """Check that the texts can be read and have enough windows, without building a model.

    The tokenizer of a model that labkit builds from a seed may not exist yet. Its texts are then
    checked by their bytes, because every token has at least one byte.

    Raises
    ------
    ConfigError
        The same mistakes as in :func:`windows_of`.
    """
    workload, model = experiment.workload, experiment.model
    if model.shape is None:
        windows_of(experiment, resolve(model))
        return
    length = workload.window_tokens
    _check_context(length, model.name, model_footprint.from_shape(model.shape, "").max_context)
    sizes = [len(text.encode()) for text in read_texts(workload.texts)]
    for number, size in enumerate(sizes, 1):
        require(
            size >= length,
            f"workload.window_tokens={length}: text {number} has only {size} bytes, and a token "
            "has one or more; set a smaller window",
        )
    _check_count(experiment, sum(size // length for size in sizes), "at most")


def _check_context(length: int, model: str, context: int | None) -> None:
    require(
        context is None or length <= context,
        f"workload.window_tokens={length}: model={model} has a context of {context} tokens; set "
        f"workload.window_tokens to at most {context}",
    )


def _check_count(experiment: Experiment, available: int, qualifier: str) -> None:
    workload = experiment.workload
    count = workload.num_windows
    require(
        count is None or count <= available,
        f"workload.num_windows={count}: workload={workload.name} has {qualifier} {available} "
        f"windows of {workload.window_tokens} tokens",
    )


def windows_of(experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
    """Return the first ``workload.num_windows`` windows of ``workload.window_tokens`` tokens.

    The windows of a text do not overlap. Tokens after a text's last whole window are not scored. A
    window is scored on its own, so its first token has no log probability.

    Raises
    ------
    ConfigError
        A text is shorter than a window, a window longer than the model's context, or there are
        fewer windows than ``workload.num_windows``.
    """
    workload = experiment.workload
    length, count = workload.window_tokens, workload.num_windows
    _check_context(length, model.name, model.max_context)
    texts = read_texts(workload.texts)
    key = prompt_key({"model": model.digest, "texts": texts, "window_tokens": length})
    windows = cached_prompts(key, lambda: _cut(texts, model, length))
    _check_count(experiment, len(windows), "only")
    return windows[:count]


def _cut(texts: tuple[str, ...], model: ModelDir, length: int) -> tuple[Prompt, ...]:
    encoder = tokenizer.load(model.path)
    windows = []
    for number, text in enumerate(texts):
        tokens = encoder.encode(text)
        require(
            len(tokens) >= length,
            f"workload.window_tokens={length}: text {number + 1} has only {len(tokens)} tokens; "
            "set a smaller window",
        )
        for start in range(0, len(tokens) - length + 1, length):
            window = tuple(tokens[start : start + length])
            windows.append(Prompt(f"text {number + 1}, token {start}", window, 1))
    return tuple(windows)
