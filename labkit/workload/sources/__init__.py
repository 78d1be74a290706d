"""Where prompts come from: packaged texts, a list, a file, a trace, or chance."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from labkit.config import Experiment
from labkit.models import ModelDir
from labkit.workload.tokenized_prompts import Prompt


class PromptSource(Protocol):
    """Where a workload's prompts come from."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Everything besides the model that decides the prompts, as JSON types."""

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise the prompts, in the order of submission."""

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Guess every request's prompt and output tokens without a tokenizer.

        Raises
        ------
        ConfigError
            What the workload names cannot be asked: one line with the file and the key.
        """


def source_of(experiment: Experiment) -> PromptSource:
    """Return the source that ``workload.prompts.source`` names."""
    module = import_module(f"labkit.workload.sources.{experiment.workload.prompts.source}")
    return cast(PromptSource, module.SOURCE)
