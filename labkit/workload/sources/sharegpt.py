"""Requests of a ShareGPT file: a JSON array of conversations between a human and a model.

As in ``vllm bench serve --dataset-name sharegpt``, each conversation gives one request: the prompt
is its first human turn, and the output is as long as the model's answer, in tokens of the served
model. Conversations without such a pair are left out. vLLM also leaves out very short and very long
requests and shuffles the others; here they stay in the file's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from labkit.config import ConfigError, Experiment, require
from labkit.config.requests import MAX_LENGTH_TOKENS
from labkit.machine.file_digest import FileState
from labkit.workload.sources import bounded_reader
from labkit.workload.sources.text_requests import BYTES_PER_TOKEN, TextRequest, TextSource
from labkit.workload.sources.vllm_custom import user_request

HUMAN, MODEL = ("human", "user"), ("gpt", "chatgpt", "assistant", "model")


def _requests(path: str) -> Iterator[TextRequest]:
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


@lru_cache(maxsize=4)
def _read(path: str, limit: int, state: FileState) -> tuple[TextRequest, ...]:
    requests = tuple(islice(_requests(path), limit))
    bounded_reader.refuse_more(path, requests)
    return requests


def _first_requests(experiment: Experiment) -> tuple[TextRequest, ...]:
    path = experiment.workload.prompts.path or ""
    return _read(path, bounded_reader.limit(experiment), bounded_reader.state_of(path))


SOURCE = TextSource(_first_requests, "requests")
