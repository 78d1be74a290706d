"""The contract of sources of prompts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from labkit.config import Experiment, count_text, is_class_path
from labkit.conformance.contract import Check, Compose, demand
from labkit.models import resolve
from labkit.workload.tokenized_prompt import Prompt


def source_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the prompt source ``path``: ``package.module:Class`` or built-in name."""
    made: list[Any] = []

    def load() -> None:
        if is_class_path(path):
            module, _, name = path.partition(":")
            made.append(getattr(importlib.import_module(module), name)())
        else:
            from labkit.workload.sources import source_of

            made.append(source_of(compose({"workload.prompts.source": path})))

    yield Check("it can be created without arguments", load, needed=True)
    (source,), experiment = made, compose({})
    yield Check(
        "identity() is JSON, the same every time", partial(_check_identity, source, experiment)
    )
    yield Check(
        "make() returns prompts of the model's tokens", partial(_check_prompts, source, experiment)
    )
    yield Check(
        "make() returns the same prompts every time", partial(_check_again, source, experiment)
    )
    yield Check("lengths() are those of the prompts", partial(_check_lengths, source, experiment))


def _check_identity(source: Any, experiment: Experiment) -> None:
    one, other = (json.dumps(source.identity(experiment), sort_keys=True) for _ in range(2))
    demand(isinstance(json.loads(one), dict), f"it returned {one[:60]}; it must be a dict")
    demand(one == other, f"it returned {one[:60]}, then {other[:60]}")


def _check_prompts(source: Any, experiment: Experiment) -> None:
    model = resolve(experiment.model)
    prompts = source.make(experiment, model)
    demand(
        isinstance(prompts, tuple) and all(isinstance(p, Prompt) for p in prompts),
        f"it must return a tuple of Prompts, not {type(prompts).__name__}",
    )
    demand(bool(prompts), "it returned no prompt")
    names = [prompt.request_id for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    demand(twice is None, f"two prompts have the request_id {twice}")
    for prompt in prompts:
        wrong = [token for token in prompt.token_ids if not 0 <= token < model.vocab_size]
        demand(
            not wrong,
            f"{prompt.request_id}: token {wrong[:1]} is not in the vocabulary of "
            f"{model.vocab_size} tokens",
        )


def _check_again(source: Any, experiment: Experiment) -> None:
    model = resolve(experiment.model)
    demand(
        source.make(experiment, model) == source.make(experiment, model),
        "a second call returned other prompts",
    )


def _check_lengths(source: Any, experiment: Experiment) -> None:
    prompts = source.make(experiment, resolve(experiment.model))
    lengths = [(int(prompt), int(output)) for prompt, output in source.lengths(experiment)]
    demand(
        len(lengths) == len(prompts),
        f"lengths() has {len(lengths)} entries, but there are {count_text(len(prompts), 'prompt')}",
    )
    for prompt, (_, output) in zip(prompts, lengths, strict=True):  # prompt tokens may be estimates
        demand(
            output == prompt.max_tokens,
            f"{prompt.request_id}: {output} output tokens, but max_tokens={prompt.max_tokens}",
        )
