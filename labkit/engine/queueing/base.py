"""The small protocol of queueing: who is served before whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.engine.request import RequestState


class Queue(Protocol):
    """A total order of requests: the first waits least, the last is preempted first."""

    name: str

    def key(self, state: RequestState) -> tuple[int, int]:
        """Return a request's place: unique, fixed for its life, smaller is served earlier."""

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        """Tell whether a request is admitted before one that came earlier and still waits."""
