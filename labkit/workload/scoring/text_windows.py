"""Texts to score, cut into windows of equal length."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from labkit.config import ConfigError, Experiment, count_text, require
from labkit.engine.memory_budget import model_footprint
from labkit.machine import cache_entries
from labkit.machine.exception_text import one_line
from labkit.models import ModelDir, resolve, tokenizer
from labkit.models.synthetic.synthetic_model import corpus_texts
from labkit.workload.prompt_cache import prompt_key
from labkit.workload.tokenized_prompt import Prompt

MAX_FILE_BYTES = 256 << 20
PACKAGED_TEXTS = 10  # number of texts at the start of the corpus; the rest are single questions
MIN_JUDGED_WINDOWS = 16  # fewer have no interval (statistics.block_jackknife)
NUM_PLACES = 2  # columns of the table of windows before its token ids


@dataclass(frozen=True, slots=True, eq=False)
class TextWindows(Sequence[Prompt]):
    """Windows of texts, whose prompts are made whenever they are read.

    A token takes 4 bytes, as a Python integer it would take 36.
    """

    # A row per window: the number of its text from 1, the index of its first token in the text (BOS
    # not counted), and its token ids. int32 [windows, 2 + window_tokens].
    table: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> TextWindows: ...
    def __getitem__(self, index: int | slice) -> Prompt | TextWindows:
        if isinstance(index, slice):
            return TextWindows(self.table[index])
        text, start, *tokens = self.table[index].tolist()
        return Prompt(f"text {text}, token {start}", tuple(tokens), 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextWindows) and np.array_equal(self.table, other.table)

    __hash__ = None  # type: ignore[assignment]


def _read_texts(path: str | None) -> tuple[str, ...]:
    """Return the texts of ``workload.texts``, or packaged texts if ``path`` is None.

    If the name of the file ends with ``.jsonl``, each line is an object with the key ``text``. Any
    other file is one text. Raises ``ConfigError`` if the file cannot be read, is not UTF-8, or has
    no text. The message is one line.
    """
    if path is None:
        return corpus_texts()[:PACKAGED_TEXTS]
    where = f"workload.texts={path}"
    try:
        size = Path(path).stat().st_size
        require(
            size <= MAX_FILE_BYTES, f"{where} has {size:,} bytes; the maximum is {MAX_FILE_BYTES:,}"
        )
        content = Path(path).read_text("utf-8-sig")
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
    checked by their bytes, because every token has at least one byte. Raises ``ConfigError`` as
    :func:`windows_of` does.
    """
    workload, model = experiment.workload, experiment.model
    if model.shape is None:
        windows_of(experiment, resolve(model))
        return
    length = workload.window_tokens
    _check_context(length, model.name, model_footprint.from_shape(model.shape, "").max_context)
    sizes = [len(text.encode()) for text in _read_texts(workload.texts)]
    for number, size in enumerate(sizes, 1):
        require(
            size >= length,
            f"workload.window_tokens={length}: text {number} has only {count_text(size, 'byte')}, "
            "and a token has one or more; set a smaller window",
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
    count = workload.num_windows or None
    require(
        count is None or count <= available,
        f"workload.num_windows={count}: workload={workload.name} has {qualifier} {available} "
        f"windows of {workload.window_tokens} tokens",
    )
    limits, scored = experiment.ablation.claims.quality.limits(), count or available
    require(
        not limits or scored >= MIN_JUDGED_WINDOWS,
        f"ablation.claims.quality.{next(iter(limits), '')}: {count_text(scored, 'window')} cannot "
        f"decide it; score {MIN_JUDGED_WINDOWS} or more (workload.num_windows)",
    )


def windows_of(experiment: Experiment, model: ModelDir) -> TextWindows:
    """Return the first ``workload.num_windows`` windows of ``workload.window_tokens`` tokens.

    The windows of a text do not overlap. Tokens after a text's last whole window are not scored. A
    window is scored on its own, so its first token has no log probability. If the tokenizer begins
    a text with BOS, every window begins with it, because without BOS the predictions of such a
    model are meaningless. Raises ``ConfigError`` if a text is shorter than a window, a window is
    longer than the context, or there are fewer windows than ``workload.num_windows`` or than limits
    on quality need. Raises ``CacheError`` if the cache folder cannot be written.
    """
    workload = experiment.workload
    length, count = workload.window_tokens, workload.num_windows or None
    _check_context(length, model.name, model.max_context)
    texts = _read_texts(workload.texts)
    key = prompt_key({"model": model.digest, "texts": texts, "window_tokens": length})
    windows = TextWindows(_cached_table(key, length, lambda: _cut(texts, model, length)))
    _check_count(experiment, len(windows), "only")
    return windows[:count]


def _cached_table(
    key: str, length: int, make: Callable[[], NDArray[np.int32]]
) -> NDArray[np.int32]:
    """Return the cached table of windows, made if missing. It is mapped into memory."""
    path = cache_entries.root() / "workloads" / f"{key}.npy"
    try:
        return _mapped(path, length)
    except FileNotFoundError:
        pass
    except (ValueError, EOFError):  # foreign or damaged: it is only a cache
        path.unlink(missing_ok=True)
    content = io.BytesIO()
    np.save(content, make(), allow_pickle=False)
    cache_entries.write_file(path, content.getvalue())
    return _mapped(path, length)


def _mapped(path: Path, length: int) -> NDArray[np.int32]:
    """Map a table of windows of ``length`` tokens; raises ``ValueError`` if it is not one."""
    table = np.load(path, mmap_mode="r", allow_pickle=False)
    if table.dtype != np.int32 or table.ndim != 2 or table.shape[1] != NUM_PLACES + length:
        raise ValueError(f"{path} is not a table of windows of {length} tokens")
    return np.asarray(table)


def _cut(texts: tuple[str, ...], model: ModelDir, length: int) -> NDArray[np.int32]:
    encoder = tokenizer.load(model.path)
    prefix, encoded = encoder.text_prefix, map(encoder.encode, texts)
    return np.concatenate([_cut_text(n, ids, prefix, length) for n, ids in enumerate(encoded, 1)])


def _cut_text(
    number: int, tokens: Sequence[int], prefix: Sequence[int], length: int
) -> NDArray[np.int32]:
    """Return the windows of a text, whose ``tokens`` begin with ``prefix``, as each window does."""
    require(
        len(tokens) >= length,
        f"workload.window_tokens={length}: text {number} has only "
        f"{count_text(len(tokens), 'token')}; set a smaller window",
    )
    step = length - len(prefix)  # tokens of the text in a window
    require(
        step > 0,
        f"workload.window_tokens={length}: a window begins with the model's "
        f"{count_text(len(prefix), 'special token')}; set a larger window",
    )
    text = tokens[len(prefix) :]
    count = len(text) // step
    table = np.empty((count, NUM_PLACES + length), np.int32)
    table[:, 0] = number
    table[:, 1] = np.arange(count) * step
    table[:, NUM_PLACES : NUM_PLACES + len(prefix)] = prefix
    table[:, NUM_PLACES + len(prefix) :] = np.reshape(text[: count * step], (count, step))
    return table
