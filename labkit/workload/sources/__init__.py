"""Sources of prompts: packaged texts, a list, a file, a trace, or random token ids."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.tokenized_prompts import Prompt


class PromptSource(Protocol):
    """A source of a workload's prompts."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Return everything but the model that decides the prompts, as JSON types."""

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise the prompts, in the order of submission."""

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Return every request's prompt and output tokens, estimated without a tokenizer.

        Raises
        ------
        ConfigError
            The workload's prompts are invalid; one line names the file and the key.
        """


def source_of(experiment: Experiment) -> PromptSource:
    """Return the source that ``workload.prompts.source`` names."""
    module = import_module(f"labkit.workload.sources.{experiment.workload.prompts.source}")
    return cast(PromptSource, module.SOURCE)
