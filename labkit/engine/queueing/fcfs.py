"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.request import RequestState


class Fcfs:
    """In the order of arrival; a preempted request is thereby in front of all that wait."""

    name = "fcfs"

    def key(self, state: RequestState) -> tuple[int, int]:
        """See ``Queue.key``."""
        return 0, state.serial

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        """See ``Queue.overtakes``."""
        return False
