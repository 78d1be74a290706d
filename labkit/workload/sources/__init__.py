"""Sources of a workload's prompts, one for each value of ``workload.prompts.source``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.tokenized_prompt import Prompt

# The module and the name of the source of each value.
_SOURCES = {
    "synthetic": "synthetic.SOURCE",
    "chat": "packaged_questions.SOURCE",
    "agent": "agent.SOURCE",
    "listed": "listed.LISTED",
    "file": "listed.FILE",
    "vllm_custom": "listed.VLLM_CUSTOM",
    "sharegpt": "listed.SHAREGPT",
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
