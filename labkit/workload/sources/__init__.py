"""Sources of a workload's prompts, one for each value of ``workload.prompts.source``.

A source may be of the user's own. The functions here return what sources return, in the types and
the number that a workload needs. What a source returns wrong is one line that names the method.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast, runtime_checkable

from labkit.config import Experiment
from labkit.engine.user_classes import UserClassError
from labkit.models import ModelDir
from labkit.workload.tokenized_prompt import Prompt, take_first

# The module and the name of the source of each value.
_SOURCES = {
    "synthetic": "synthetic.SOURCE",
    "chat": "chat_and_agent.CHAT",
    "agent": "chat_and_agent.AGENT",
    "listed": "request_datasets.LISTED",
    "file": "request_datasets.FILE",
    "vllm_custom": "request_datasets.VLLM_CUSTOM",
    "sharegpt": "request_datasets.SHAREGPT",
    "trace": "trace_source.MOONCAKE",
    "burstgpt": "trace_source.BURSTGPT",
    "azure": "trace_source.AZURE",
}


class PromptSource(Protocol):
    """A source of a workload's prompts."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Return all inputs that determine the prompts, except the model, as JSON types."""

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Return the tokenised prompts in the order of submission."""

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Return each request's numbers of prompt and output tokens, without a tokenizer.

        The prompt tokens of a text are estimated. Raises ``ConfigError`` if the workload's prompts
        are invalid. The message is one line with the file and the key.
        """


@runtime_checkable
class TimestampedSource(Protocol):
    """A source whose requests may have timestamps, for ``workload.arrivals.kind=trace``."""

    def timestamps_ms(self, experiment: Experiment) -> Sequence[float | None]:
        """Return each request's timestamp in milliseconds, or None if it has none."""


@runtime_checkable
class SessionSource(Protocol):
    """A source whose requests may belong to sessions, which then arrive at the workload's rate."""

    def num_sessions(self, experiment: Experiment) -> int:
        """Return the number of sessions. A request without a session counts as one."""


def source_of(experiment: Experiment) -> PromptSource:
    """Return the source that ``workload.prompts.source`` names."""
    module, _, name = _SOURCES[experiment.workload.prompts.source].partition(".")
    return cast(PromptSource, getattr(import_module(f"{__name__}.{module}"), name))


def identity(source: PromptSource, experiment: Experiment) -> dict[str, Any]:
    """Return what determines a source's prompts besides the model, as JSON types."""
    returned = source.identity(experiment)
    try:
        json.dumps(returned, sort_keys=True)
    except (TypeError, ValueError) as error:
        _refuse(experiment, "identity", f"a dict of JSON types ({error})")
    return returned


def prompts(source: PromptSource, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
    """Return all prompts of a source; ``workload.num_requests`` does not matter."""
    made = _items(experiment, "make", source.make(experiment, model))
    wrong = next((item for item in made if not isinstance(item, Prompt)), None)
    if wrong is not None:
        _refuse(experiment, "make", f"Prompts, not {type(wrong).__name__}")
    try:
        return tuple(map(_in_json_types, made))
    except (TypeError, ValueError) as error:
        _refuse(experiment, "make", f"Prompts whose numbers are ints ({error})")


def lengths(source: PromptSource, experiment: Experiment) -> list[tuple[int, int]]:
    """Return the prompt tokens, which may be estimates, and the output tokens of each request."""
    pairs = _items(experiment, "lengths", source.lengths(experiment))
    try:
        numbers = [(int(prompt), int(output)) for prompt, output in pairs]
    except (TypeError, ValueError, OverflowError):
        _refuse(experiment, "lengths", "pairs of numbers: prompt tokens and output tokens")
    return list(take_first(experiment, numbers))


def timestamps_ms(source: TimestampedSource, experiment: Experiment) -> list[float | None]:
    """Return each request's arrival time in a trace, in milliseconds, or None if it has none."""
    times = _items(experiment, "timestamps_ms", source.timestamps_ms(experiment))
    try:
        numbers = [None if time is None else float(time) for time in times]
    except (TypeError, ValueError):
        _refuse(experiment, "timestamps_ms", "numbers of milliseconds, or None for no time")
    return list(take_first(experiment, numbers))


def _items(experiment: Experiment, method: str, returned: Any) -> Sequence[Any]:
    """Return the items of a list, tuple or generator, of which there must be one."""
    if not isinstance(returned, Iterable):
        _refuse(experiment, method, f"a sequence, not {type(returned).__name__}")
    items = list(returned)
    if not items:
        _refuse(experiment, method, "an item for each request, and returned none")
    return items


def _in_json_types(prompt: Prompt) -> Prompt:
    """Return a prompt whose numbers are Python's own, as NumPy's are not JSON."""
    time = prompt.timestamp_ms
    return replace(
        prompt,
        token_ids=tuple(map(operator.index, prompt.token_ids)),
        max_tokens=operator.index(prompt.max_tokens),
        timestamp_ms=None if time is None else float(time),
    )


def _refuse(experiment: Experiment, method: str, must_return: str) -> NoReturn:
    kind = experiment.workload.kind
    raise UserClassError(f"workload.kind={kind}: {method}() must return {must_return}", kind)
