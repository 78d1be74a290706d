"""What every kind of workload offers; a kind is one module with a ``KIND``."""

from __future__ import annotations

from typing import Protocol

from labkit.config import Experiment
from labkit.workload.measurement import Estimate, Session

START_SECONDS = 1.5  # of a worker: imports, both probes, the record (estimate)


class Kind(Protocol):
    """One kind of workload. ``prepare`` and ``estimate`` import no engine."""

    def prepare(self, experiment: Experiment) -> None:
        """Check that the workload can be asked of this engine, and cache what workers need.

        Raises
        ------
        ConfigError
            It can't; one line says why and what to set.
        """

    def load(self, experiment: Experiment, *, seed: int) -> Session:
        """Make the workload ready in this process."""

    def estimate(self, experiment: Experiment) -> Estimate:
        """Guess what one run costs, by arithmetic alone."""
