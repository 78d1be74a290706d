"""By the client's priority, the lower number first; equals in the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.request import RequestState


class Priority:
    """A request is overtaken while it waits and preempted for others, as its number says."""

    name = "priority"

    def key(self, state: RequestState) -> tuple[int, int]:
        """See ``Queue.key``."""
        return state.request.priority, state.serial

    def overtakes(self, state: RequestState, waiting: Sequence[RequestState]) -> bool:
        """See ``Queue.overtakes``."""
        return any(other.serial < state.serial for other in waiting)
