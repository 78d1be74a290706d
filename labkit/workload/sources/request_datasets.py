"""Sources of requests that the user lists: ``listed``, ``file``, ``vllm_custom``, ``sharegpt``.

- ``listed``: in the config itself, ``workload.prompts.listed``.
- ``file``: JSON lines, each a ``ListedRequest``, such as ``{"prompt": ...}``.
- ``vllm_custom``: JSON lines, each a request of vLLM's custom dataset, such as
  ``{"prompt": ..., "output_tokens": 20}``. As in ``vllm bench serve --dataset-name custom``, the
  prompt is one user message if the model has a chat template, and other keys are ignored.
- ``sharegpt``: a JSON array of conversations between a human and a model. As in
  ``vllm bench serve --dataset-name sharegpt``, each gives one request: the prompt is its first
  human turn, and the output is as long as the model's answer, in tokens of the served model.
  Conversations without such a pair are left out. vLLM also leaves out very short and very long
  requests and shuffles the others; here they stay in the file's order.

Elsewhere, a length that is not set is drawn from ``workload.prompts.output``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from labkit.config import ConfigError, Experiment, ListedRequest, Message, require, to_plain
from labkit.config.option import Group, option
from labkit.config.requests import MAX_LENGTH_TOKENS
from labkit.workload.sources import bounded_reader
from labkit.workload.sources.text_requests import BYTES_PER_TOKEN, TextRequest, TextSource, plain
from labkit.workload.tokenized_prompt import draw_lengths, prompts_seed

SEED_STREAM = 6  # number of this source's random stream, used together with the seed
HUMAN, MODEL = ("human", "user"), ("gpt", "chatgpt", "assistant", "model")  # speakers in ShareGPT


def texts(experiment: Experiment, listed: Sequence[ListedRequest]) -> list[TextRequest]:
    """Return the listed requests, with a drawn output length if ``max_tokens`` is not set."""
    rng = np.random.default_rng([prompts_seed(experiment), SEED_STREAM])
    drawn = draw_lengths(experiment.workload.prompts.output, rng, len(listed))
    requests = []
    for one, output in zip(listed, drawn, strict=True):
        messages = None if one.messages is None else tuple(to_plain(one.messages))
        parts = (one.prompt or "",) if messages is None else tuple(map(plain, messages))
        tokens = output if one.max_tokens is None else one.max_tokens
        requests.append(TextRequest(parts, tokens, messages, one.session, one.timestamp))
    return requests


@dataclass
class CustomRequest(Group):
    """One line of a file in the format of vLLM's custom dataset."""

    prompt: str | None = option(None)
    output_tokens: int | None = option(None, ge=1, le=MAX_LENGTH_TOKENS, unit="tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.prompt is not None, "prompt is missing")
        user_request(self.prompt or "")


def user_request(prompt: str, max_tokens: int | None = None) -> ListedRequest:
    """Return a request with one user message; raises :class:`labkit.config.ConfigError`."""
    return ListedRequest(messages=[Message("user", prompt)], max_tokens=max_tokens)


def _from_vllm_file(experiment: Experiment) -> list[TextRequest]:
    lines = bounded_reader.read_json_lines(experiment, CustomRequest, other_keys=True)
    listed = [user_request(line.prompt or "", line.output_tokens) for line in lines]
    requests = zip(lines, texts(experiment, listed), strict=True)
    return [replace(text, parts=(line.prompt or "",)) for line, text in requests]


def _from_sharegpt(path: str) -> Iterator[TextRequest]:
    for where, item in bounded_reader.array_items(path):
        turns = item.get("conversations") if isinstance(item, Mapping) else None
        require(isinstance(turns, list), f"{where} is not an object with a list 'conversations'")
        for turn, answer in zip(turns or (), (turns or ())[1:], strict=False):
            if _speaker(where, turn) in HUMAN and _speaker(where, answer) in MODEL:
                if turn["value"].strip() and answer["value"].strip():
                    yield _request(where, turn["value"], answer["value"])
                break


def _speaker(where: str, turn: Any) -> str:
    known = isinstance(turn, Mapping) and {str} == {
        type(turn.get(key)) for key in ("from", "value")
    }
    require(known, f"{where}: a turn is not an object with the texts 'from' and 'value'")
    return str(turn["from"])


def _request(where: str, prompt: str, answer: str) -> TextRequest:
    try:
        user_request(prompt)
        user_request(answer)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    estimate = 1 + len(answer.encode()) // BYTES_PER_TOKEN
    require(
        estimate <= MAX_LENGTH_TOKENS,
        f"{where}: the answer has about {estimate:,} tokens, too many",
    )
    return TextRequest((prompt,), estimate, ({"role": "user", "content": prompt},), answer=answer)


LISTED = TextSource(lambda e: texts(e, e.workload.prompts.listed), "requests")
FILE = TextSource(lambda e: texts(e, bounded_reader.read_json_lines(e, ListedRequest)), "requests")
VLLM_CUSTOM = TextSource(_from_vllm_file, "requests")
SHAREGPT = TextSource(lambda e: bounded_reader.first_requests(e, _from_sharegpt), "requests")
