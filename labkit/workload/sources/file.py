"""Requests from a file: a line is ``{"prompt": ...}`` or ``{"messages": [...]}``, see ``Asked``."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import Asked, Experiment
from labkit.workload.sources import json_lines
from labkit.workload.sources.listed import texts
from labkit.workload.sources.text_requests import Text, Texts


def _read(experiment: Experiment) -> Sequence[Text]:
    return texts(experiment, json_lines.read(experiment.workload.prompts.path or "", Asked))


SOURCE = Texts(_read, "requests")
