"""Static batches: all join when none runs, and the next batch waits for the last to end."""

from __future__ import annotations


class Static:
    """Admits a whole batch into an empty running set, whatever the step's token budget."""

    name = "static"

    def open(self, num_running: int, budget: int) -> bool:
        """See ``Admission.open``."""
        return num_running == 0
