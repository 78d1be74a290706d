"""Requests from a JSON-lines file: one ``ListedRequest`` per line, such as ``{"prompt": ...}``."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import Experiment, ListedRequest
from labkit.workload.sources import json_lines
from labkit.workload.sources.listed import texts
from labkit.workload.sources.text_requests import TextRequest, TextSource


def _read(experiment: Experiment) -> Sequence[TextRequest]:
    return texts(experiment, json_lines.read(experiment.workload.prompts.path or "", ListedRequest))


SOURCE = TextSource(_read, "requests")
