"""``engine.speculation=none``: one token per request and step."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput


class NoSpeculation:
    """Drafts nothing."""

    name = "none"

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step as it is."""
        return output

    def accept(
        self, output: SchedulerOutput, drawn: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Give each sampling request its one token."""
        sampling = (chunk for chunk in output.chunks if chunk.samples)
        return {
            chunk.state.request_id: (token,) for chunk, token in zip(sampling, drawn, strict=True)
        }
